"""The hosts of the degree study: vision transformers on digits, and a language model on prose, all mixed by PADRe."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import polymix
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.domains.text.data import TextData
from polymix.domains.text.metrics import summed_loss
from polymix.domains.text.recipe import TextRecipe
from polymix.domains.text.task import TextTask
from polymix.models import VisionTransformer
from polymix.train.data.images import ImageData, load_digits
from polymix.train.data.sampling import Slices

Run = dict[str, Any]
FIXED = {"kernel_size": 3, "weight": "channel"}  # every W_i is learned, one number per channel


class Digits:
    """A vision transformer on scikit-learn's digits. score: the metric that judges it."""

    score: ClassVar[str] = "accuracy"

    def __init__(self, options: Run, **recipe: Any) -> None:
        self.options, self.recipe = options, ClassifyRecipe(image_size=8, **recipe)

    def load(self, folder: Path) -> ImageData:
        return load_digits(8)

    def task(self, run: Run) -> ClassifyTask:
        return ClassifyTask(self.recipe.changed(seed=run["seed"], precision=run["precision"]))

    def build(self, run: Run, data: ImageData) -> nn.Module:
        chosen = {key: run[key] for key in ("degree", "basis", "normalize")}
        return VisionTransformer(polymix.PadreConfig(**FIXED, **chosen), **self.options)

    def without_model(self, data: ImageData) -> dict[str, float]:
        return {}

    def loss(self, model: nn.Module, data: ImageData) -> Tensor:
        images, labels = data.train.images[:256], data.train.labels[:256]
        return F.cross_entropy(model(data.normalise(images)), labels)


class Prose:
    """A language model on the prose of Python's library, in 512 tokens of a byte-level BPE."""

    score: ClassVar[str] = "loss"

    def __init__(self, options: Run, **recipe: Any) -> None:
        self.options = options
        self.recipe = TextRecipe(options=options, context=128, vocab=512, prompts=(), evaluate_every=None, **recipe)

    def load(self, folder: Path) -> TextData:
        return TextTask(self.recipe).load(folder)

    def task(self, run: Run) -> TextTask:
        words = {"degree": run["degree"], "basis": run["basis"], **FIXED}
        words |= {} if run["normalize"] is None else {"normalize": run["normalize"]}
        mixer = ":".join(["padre", *(f"{key}={value}" for key, value in words.items())])
        return TextTask(self.recipe.changed(mixer=mixer, seed=run["seed"], precision=run["precision"]))

    def build(self, run: Run, data: TextData) -> nn.Module:
        return self.task(run).build(data)

    def without_model(self, data: TextData) -> dict[str, float]:
        """frequencies: the held-out loss of one who only knows how often each token occurs."""
        train, held = (part[0 : len(part)] for part in (data.train, data.val))
        shares = torch.bincount(train, minlength=data.vocab).add(1).double()
        return {"frequencies": -(shares / shares.sum()).log()[held].mean().item()}

    def loss(self, model: nn.Module, data: TextData) -> Tensor:
        task = TextTask(self.recipe)
        batch = next(task.batches(data, Slices()))
        return summed_loss(model, batch) / batch["targets"].numel()


IMAGES = {"image_size": 8, "patch_size": 2, "channels": 1, "classes": 10}
HOSTS: dict[str, tuple[type[Digits | Prose], Run]] = {
    "tight": (Digits, {**IMAGES, "dim": 8, "depth": 1, "mlp_ratio": 0.125}),
    "roomy": (Digits, {**IMAGES, "dim": 32, "depth": 2, "mlp_ratio": 0.25}),
    "deep": (Digits, {**IMAGES, "dim": 16, "depth": 8, "mlp_ratio": 0.25}),
    "text": (Prose, {"hidden_size": 64, "intermediate_size": 64, "num_layers": 8, "num_heads": 1, "positions": "none"}),
}
