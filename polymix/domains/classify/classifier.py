"""Classify single pictures with a model that `polymix train` saved."""

from __future__ import annotations

from pathlib import Path

import torch

from polymix.domains.classify.data import from_summary
from polymix.domains.classify.metrics import prepare
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.errors import DataError
from polymix.train.data.pictures import open_picture
from polymix.train.saved import SavedRun


class Classifier:
    """The image classifier in a folder of `polymix train`: classifier("cat.jpg") returns {"cat": 0.93, "dog": 0.07}.

    Pictures are turned, cropped, resized and normalised as in the training. The likeliest class comes first.

    Args:
        folder: of a finished run of the task images, trained on picture files.
    Raises:
        DataError: the run is of another task, or of scikit-learn's digits, which are no files.
        ResultsError: the folder holds no finished run.
    """

    def __init__(self, folder: str | Path) -> None:
        run = SavedRun.of(folder)
        recipe = run.recipe
        if not isinstance(recipe, ClassifyRecipe) or not run.summary.get("bytes"):
            got = f"{folder}, of {run.task.name} on {run.summary.get('name')}"
            raise DataError("folder", got, "a run of images on a folder of pictures", "Train one with --data FOLDER.")
        self.data, self.recipe, self.model = from_summary(recipe, run.summary), recipe, run.load()

    @property
    def classes(self) -> tuple[str, ...]:
        return self.data.classes

    @torch.no_grad()
    def __call__(self, path: str | Path) -> dict[str, float]:
        """The probability of each class for a picture file. Raises DataError if it cannot be read."""
        shares = self.model(prepare(open_picture(Path(path)), self.recipe, self.data)).softmax(1)[0]
        order = shares.argsort(descending=True).tolist()
        return {self.classes[place]: shares[place].item() for place in order}
