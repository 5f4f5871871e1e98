"""What the vision transformer and the blocks refuse."""

from contextlib import suppress

import pytest
import torch

import polymix
from polymix import errors
from polymix.errors import OptionError, ShapeError
from polymix.models import VisionTransformer
from tests.errors.helpers import NoCompute, says, x
from tests.helpers import jitter


def host(**changes):
    options = {"mixer": polymix.PomConfig(), "image_size": 8, "patch_size": 4, "dim": 8, "depth": 1, "classes": 3}
    return VisionTransformer(**{**options, **changes})


@pytest.mark.parametrize(("option", "value", "words"), [
    ("depth", 0, ["0", "depth=1"]), ("classes", 0, ["0", "at least 1"]), ("patch_size", 0, ["0", "at least 1"]),
    ("patch_size", 2.0, ["2.0", "an integer"]), ("dim", 0, ["0", "at least 1"]), ("dim", "8", ["'8'", "an integer"]),
    ("image_size", 10, ["10", "multiple of patch_size=4", "Change one"]), ("image_size", 0, ["0", "multiple"]),
    ("image_size", (8, 10), ["(8, 10)", "multiple"]), ("image_size", (8,), ["(8,)"]), ("image_size", 8.0, ["8.0"]),
    ("image_size", "8", ["8"]), ("channels", 0, ["0"]), ("mixer", "pom", ["pom"]), ("mixer", None, ["None"]),
    ("mlp_ratio", 0, ["0"]), ("mlp_ratio", -1.0, ["-1.0"]),
])  # fmt: skip
def test_vision_transformer_options(option, value, words):
    says(lambda: host(**{option: value}), OptionError, option, *words)


@pytest.mark.parametrize(("images", "words"), [
    (x(2, 3, 8, 9), ["(2, 3, 8, 9)", "(B, 3, 8, 8)", "Resize"]), (x(2, 1, 8, 8), ["(2, 1, 8, 8)", "(B, 3, 8, 8)"]),
    (x(3, 8, 8), ["(3, 8, 8)", "(B, 3, 8, 8)"]), ([1.0], ["list", "(B, 3, 8, 8)"]),
    (x(2, 3, 8, 8, dtype=torch.float64), ["float64", "float32"]), (x(2, 3, 8, 8).to("meta"), ["meta", "cpu"]),
    (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["uint8", "float32"]),
])  # fmt: skip
def test_vision_transformer_images(images, words):
    model = host()
    with NoCompute():
        says(lambda: model(images), ShapeError, "images", *words)


def test_vision_transformer_with_a_causal_mixer_and_a_class_token():
    """In front, the token would see itself alone, and every image get the same answer: refuse, or let it see them."""
    model = None
    with suppress(errors.PolymixError):
        model = host(mixer=polymix.PadreConfig(causal=True, kernel_size=3), class_token=True)
    if model is not None:
        a, b = jitter(model)(x(2, 3, 8, 8))
        assert (a - b).abs().max() > 1e-3, "the logits do not depend on the image"


@pytest.mark.parametrize(("option", "value"), [("norm", "batch"), ("mixer", "pom"), ("mlp_ratio", 0), ("dropout", 2.0)])
def test_block_options(option, value):
    options = {"mixer": polymix.PomConfig(), option: value}
    says(lambda: polymix.MixerBlock(8, **options), OptionError, option, str(value))
