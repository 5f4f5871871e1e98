"""torchvision's ViT, Swin and MaxViT converted; and models of other libraries where torchvision is not there."""

import subprocess
import sys

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, OptionError
from tests.convert.checks import MIXERS, answer, converts, refuses, same_as_host, survives, undoes

cure_torchvision()
vision = pytest.importorskip("torchvision", reason="untested: models of torchvision").models

IMAGES = torch.randn(2, 3, 12, 12, generator=torch.Generator().manual_seed(0))


BIAS = ("position_bias",)


def vit():
    return vision.VisionTransformer(12, 4, 2, 2, 16, 24, num_classes=5)


def swin(windows=(2, 2), depths=(2,), size=2):
    return vision.SwinTransformer(
        [2, 2], 16, list(depths), [2] * len(depths), list(windows), num_classes=5, stochastic_depth_prob=0.0
    )


def maxvit():
    return vision.MaxVit(
        (16, 16), stem_channels=8, partition_size=2, block_channels=[16], block_layers=[1], head_dim=8,
        stochastic_depth_prob=0.0, num_classes=5,
    )  # fmt: skip


# ViT


def test_vit_with_softmax_is_the_vit():
    report = same_as_host(vit(), IMAGES, input=IMAGES)
    assert [layer.name for layer in report.layers] == [
        f"encoder.layers.encoder_layer_{i}.self_attention" for i in (0, 1)
    ]
    assert all(layer.error < 1e-5 and layer.tokens == 10 for layer in report.layers)


@pytest.mark.parametrize("mixer", MIXERS)
def test_vit_converts(mixer):
    report = converts(vit(), mixer, IMAGES, input=IMAGES)
    assert {(adapter.grid, adapter.prefix) for adapter in report.adapters.values()} == {((3, 3), 1)}
    survives(report.model, IMAGES, backend="eager" if mixer == "padre" else None)
    undoes(vit(), mixer, IMAGES)


def test_the_size_of_the_images_stays_the_host_s():
    model = polymix.convert(vit(), "padre").model
    with pytest.raises(AssertionError, match="Wrong image height"):
        model(torch.randn(1, 3, 16, 12))


# Swin


@pytest.mark.parametrize(
    ("windows", "size"), [((2, 2), (12, 12)), ((2, 2), (16, 16)), ((3, 2), (14, 10)), ((2, 2), (20, 4)), ((4, 4), (6, 8))],
    ids=str,
)  # fmt: skip
def test_swin_with_softmax_is_the_swin(windows, size):
    """Windows that fit and that are filled up, shifted on both axes, on one, and on none."""
    images = torch.randn(2, 3, *size)
    report = same_as_host(swin(windows), images, input=images)
    assert "relative_position_bias_table" in report.layers[0].inherited["table"]


def test_swin_of_two_stages():
    same_as_host(swin(depths=(2, 2)), torch.randn(1, 3, 16, 16))


@pytest.mark.parametrize("mixer", MIXERS)
def test_swin_converts_without_its_windows(mixer):
    images = torch.randn(2, 3, 12, 12)
    report = converts(swin(), mixer, images, input=images, windows="merge", drop=BIAS)
    assert report.layers[0].tokens == 36 and "relative_position_bias_table" in report.layers[0].dropped
    survives(report.model, images, backend=None)
    undoes(swin(), mixer, images, input=images, windows="merge", drop=BIAS)
    assert answer(report.model, torch.randn(1, 3, 8, 20))[0].shape == (1, 5)


@pytest.mark.parametrize("mixer", MIXERS)
def test_swin_converts_within_its_windows(mixer):
    images = torch.randn(2, 3, 10, 14)
    plan = {"features.1.*.attn": mixer}  # the second is shifted
    report = converts(swin(), plan, images, input=images, drop=BIAS)
    assert report.adapters["features.1.0.attn"].grid == report.adapters["features.1.1.attn"].grid == (2, 2)
    survives(report.model, images, backend="eager" if mixer == "qt" else None)
    undoes(swin(), plan, images, drop=BIAS)


def test_tokens_that_were_no_neighbours_do_not_see_each_other_in_a_shifted_window():
    model = polymix.convert(swin(), {"features.1.1.attn": "pom"}, drop=BIAS).model.eval()
    layer = model.features[1][1].attn
    x = torch.randn(1, 4, 4, 16)
    with torch.no_grad():
        before = layer(x)
        x[0, 0, 0] += 1.0  # after the roll it shares a window with the other corners
        changed = (layer(x) - before).abs().amax(-1)[0] > 1e-6
    assert changed[0, 0] and changed.sum() == 1


def test_mixers_tied_to_another_size_than_the_regions_are_an_error():
    tied = polymix.PadreConfig(weight="full", grid=(2, 2))
    refuses(swin(), tied, CapabilityError, 'features.1.1.attn .*shifted windows.*windows="merge"', drop=BIAS)
    refuses(swin(), "padre", OptionError, "features.1.0.attn .*grid.*Pass grid=", windows="merge", drop=BIAS)
    refuses(swin(), "qt", OptionError, r"the window, \(2, 2\)", grid=(3, 3), drop=BIAS)


def test_swin_v2_is_listed_as_unknown():
    model = vision.swin_transformer.SwinTransformer(
        [2, 2], 16, [2], [2], [2, 2], num_classes=5, block=vision.swin_transformer.SwinTransformerBlockV2,
        downsample_layer=vision.swin_transformer.PatchMergingV2,
    )  # fmt: skip
    refuses(model, "qt", OptionError, r"features.1.0.attn \(ShiftedWindowAttentionV2\)")


# MaxViT


def test_maxvit_with_softmax_is_the_maxvit():
    report = same_as_host(maxvit(), torch.randn(2, 3, 16, 16))
    assert len(report.layers) == 2


@pytest.mark.parametrize("mixer", MIXERS)
def test_maxvit_converts(mixer):
    images = torch.randn(2, 3, 16, 16)
    report = converts(maxvit(), mixer, images, input=images, drop=BIAS)
    survives(report.model, images, backend=None)
    undoes(maxvit(), mixer, images, drop=BIAS)
    refuses(maxvit(), mixer, OptionError, "MaxViT", windows="merge", drop=BIAS)


# Without torchvision

MISSING = """
import sys
import polymix.convert.adapters.torchvision
print("torchvision" in sys.modules)
sys.modules["torchvision"] = None
import torch, polymix
from torch import nn
from polymix.compat import cure_torchvision
assert cure_torchvision() is False
model = nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, batch_first=True), 1)
polymix.convert(model, "pom", input=torch.randn(1, 5, 16))
polymix.insert(model, "layers.0.linear1", "poly_nl")
print("fine")
"""


@pytest.mark.slow
def test_conversion_needs_no_torchvision():
    """And its adapters do not import it."""
    run = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True)
    assert run.stdout.split() == ["False", "fine"], run.stderr
