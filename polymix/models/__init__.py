"""Hosts that no library has."""

from polymix.models.vit import VisionTransformer, call_options, fit_to_grid

__all__ = ["VisionTransformer", "call_options", "fit_to_grid"]
