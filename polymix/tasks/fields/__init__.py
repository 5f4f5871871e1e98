"""Crops from series of satellite images: PASTIS and made fields, TSViT with any mixer, mIoU."""

from polymix.tasks.fields.data import FieldData, check, load, made
from polymix.tasks.fields.recipe import FieldsRecipe

__all__ = ["FieldData", "FieldsRecipe", "check", "load", "made"]
