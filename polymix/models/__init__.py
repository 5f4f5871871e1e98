"""Hosts that no library has."""

from polymix.models.vit import VisionTransformer, fit_to_grid

__all__ = ["VisionTransformer", "fit_to_grid"]
