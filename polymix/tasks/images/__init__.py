"""Image classification: data, a vision transformer with any mixer, and its training.

`polymix train recipes/images.py` trains by an `ImageRecipe`. `polymix.tasks.images.training.train` trains a model
that you build, by a `Schedule`, so that several models can be compared.
"""

from polymix.tasks.images.data import ImageData, find_images, load_digits, load_folder
from polymix.tasks.images.recipe import ImageRecipe, Schedule

__all__ = ["ImageData", "ImageRecipe", "Schedule", "find_images", "load_digits", "load_folder"]
