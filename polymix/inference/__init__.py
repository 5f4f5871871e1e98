"""Faster calls of whole models without gradients: `polymix.optimize`."""

from polymix.inference.optimize import optimize

__all__ = ["optimize"]
