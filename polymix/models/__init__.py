"""Hosts that no library has."""

from polymix.models.vit import VisionTransformer

__all__ = ["VisionTransformer"]
