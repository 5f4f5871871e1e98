"""transformers, from 4.45 on: language models, and encoders of images and text."""

from polymix.convert.adapters.transformers import causal, encoders, images

__all__ = ["causal", "encoders", "images"]
