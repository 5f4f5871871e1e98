"""Hosts that no library has."""

from polymix.models.tsvit import TSViT
from polymix.models.vit import VisionTransformer

__all__ = ["TSViT", "VisionTransformer"]
