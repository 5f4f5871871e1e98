"""`polymix convert` and `polymix.assess`: convert a model, distil it, measure it, and save it with a report."""

from polymix.workflows.convert.assessment import Assessment, assess
from polymix.workflows.convert.hub import push_to_hub

__all__ = ["Assessment", "assess", "push_to_hub"]
