"""Images out of noise: SiT with any mixer, flow matching, samplers, and how good the images are."""

from polymix.renamed import renamed_from
from polymix.tasks.images.data import GeneratorData, check, load
from polymix.tasks.images.pipeline import ImagesPipeline
from polymix.tasks.images.recipe import ImagesRecipe

__all__ = ["GeneratorData", "ImagesPipeline", "ImagesRecipe", "check", "load"]

_OLD = ("ImageData", "ImageRecipe", "Schedule", "find_images", "load_digits", "load_folder")
__getattr__ = renamed_from(__name__, "polymix.tasks.classify", *_OLD)  # which had this name
