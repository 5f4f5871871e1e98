"""`polymix lens --image digits`: where a mixer and attention look, both trained in one small vision transformer."""

from __future__ import annotations

from functools import partial
from typing import Any

from polymix.lens import Influence, influence
from polymix.mixers import MixerConfig, SoftmaxConfig
from polymix.models import VisionTransformer

HOST: dict[str, Any] = {"image_size": 16, "patch_size": 2, "dim": 32, "depth": 2}
EPOCHS = 6


def influence_on_digits(config: MixerConfig, *, seed: int = 0, epochs: float | None = None) -> Influence:
    """The influence maps of a mixer and of attention, in the last block, on the first test image.

    Trains two models for 6 epochs each, or as many as are given, which takes half a minute on one core.
    """
    from polymix.train.data.images import load_digits
    from polymix.train.in_memory import train_in_memory
    from polymix.train.registry import task_of

    data = load_digits(HOST["image_size"])
    models = []
    for mixer in (config, SoftmaxConfig()):
        build = partial(VisionTransformer, mixer, channels=data.channels, classes=len(data.classes), **HOST)
        task = task_of("classify", **HOST, epochs=epochs or EPOCHS, seed=seed)
        models.append(train_in_memory(task, data, build).model)
    return influence(models[0], data.normalise(data.test.images[:1]), beside=models[1])
