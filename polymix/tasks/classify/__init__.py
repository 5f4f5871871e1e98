"""Image classification: data, a vision transformer with any mixer, and its training.

`polymix train recipes/classify.py` trains by an `ImageRecipe`. `polymix.tasks.classify.training.train` trains a model
that you build, by a `Schedule`, so that several models can be compared.
"""

from polymix.renamed import renamed_from
from polymix.tasks.classify.data import ImageData, find_images, load_digits, load_folder
from polymix.tasks.classify.recipe import ImageRecipe, Schedule

# This package's name once was that of the module with `train`.
_TRAINING = "polymix.tasks.classify.training"
__getattr__ = renamed_from(__name__, _TRAINING, "train", "Outcome", "Trial", "Recipe", "Classifier")

__all__ = ["ImageData", "ImageRecipe", "Schedule", "find_images", "load_digits", "load_folder"]
