"""Hosts that no library has."""

from polymix.models.diffusion import Diffusion
from polymix.models.flow import Flow, Sampler
from polymix.models.sit import SiT
from polymix.models.tsvit import TSViT
from polymix.models.vit import VisionTransformer

__all__ = ["Diffusion", "Flow", "Sampler", "SiT", "TSViT", "VisionTransformer"]
