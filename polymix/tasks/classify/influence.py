"""Where a mixer and attention look: both trained on the digits in the same small vision transformer."""

from __future__ import annotations

from polymix.lens import Influence, influence
from polymix.mixers import MixerConfig, SoftmaxConfig
from polymix.models import VisionTransformer
from polymix.tasks.classify.data import load_digits
from polymix.tasks.classify.recipe import Schedule
from polymix.tasks.classify.training import train

_SIZE, _PATCH, _DIM, _DEPTH = 16, 2, 32, 2


def influence_on_digits(config: MixerConfig, *, seed: int = 0, epochs: int = 6) -> Influence:
    """The influence maps of a mixer and of attention, in the last block, on the first test image.

    Trains two models for `epochs` epochs each, which takes half a minute on one core.
    """
    data = load_digits(_SIZE)
    models = []
    for mixer in (config, SoftmaxConfig()):
        host = {"image_size": _SIZE, "patch_size": _PATCH, "dim": _DIM, "depth": _DEPTH, "classes": len(data.classes)}
        build = lambda mixer=mixer, host=host: VisionTransformer(mixer, channels=data.channels, **host)  # noqa: E731
        models.append(train(build, data, Schedule(epochs=epochs), seed=seed)[0])
    return influence(models[0], data.normalise(data.test[0][:1]), beside=models[1])
