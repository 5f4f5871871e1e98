"""`polymix convert` and `polymix.assess`: convert a model, distil it, measure it, and save it with a report."""

from polymix.workflows.convert.assessment import Assessment, assess

__all__ = ["Assessment", "assess"]
