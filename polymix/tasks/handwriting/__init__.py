"""Handwriting: lines of handwritten text, read by HTR-VT with any mixer (PoM, Sec. 4.2)."""

from polymix.tasks.handwriting.recipe import HandwritingRecipe

__all__ = ["HandwritingRecipe"]
