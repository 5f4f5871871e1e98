"""Training language models on text: `train_text` with a `TextRecipe`."""

from polymix.tasks.text.recipe import TextRecipe
from polymix.tasks.text.run import train_text

__all__ = ["TextRecipe", "train_text"]
