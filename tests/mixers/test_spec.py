"""Mixers and options as people type them."""

import pytest

import polymix
from polymix.errors import OptionError, PolymixError, UnknownNameError
from polymix.mixers.spec import DEFAULT, parse_mixer, parse_mixers
from polymix.options import parse_options
from polymix.workflows.compare.settings import Settings


@pytest.mark.parametrize(("text", "label", "config"), [
    ("padre:degree=3", "padre-3", polymix.PadreConfig(degree=3)),
    ("padre-3", "padre-3", polymix.PadreConfig(degree=3)),
    ("padre-3:kernel_size=7", "padre:degree=3:kernel_size=7", polymix.PadreConfig(degree=3, kernel_size=7)),
    ("pom:degree=3:expand=1", "pom:degree=3:expand=1", polymix.PomConfig(degree=3, expand=1)),
    ("pom:expand=1.5:bias=false", "pom:expand=1.5:bias=false", polymix.PomConfig(expand=1.5, bias=False)),
    ("padre:degree=3:terms=1x3:A=identity/depthwise/depthwise", "padre:degree=3:terms=1x3:A=identity/depthwise/depthwise",
     polymix.PadreConfig(degree=3, terms=(1, 3), A=("identity", "depthwise", "depthwise"))),
    ("padre:normalize=none:kernel_size=3x5", None, None),
    (" qt:form=full ", "qt:form=full", polymix.QtConfig(form="full")),
    ("poly_nl:order=2+3", "poly_nl:order=2+3", polymix.PolyNlConfig(order="2+3")),
    ("padre:token=toeplitz:filter=implicit:degree=3:channel=monarch:blocks=8",
     "padre:token=toeplitz:filter=implicit:degree=3:channel=monarch:blocks=8",
     polymix.PadreConfig(degree=3, token="toeplitz:filter=implicit", channel="monarch:blocks=8")),
    ("padre:A=identity/mean+depthwise:kernel=5", "padre:A=identity/mean+depthwise:kernel=5",
     polymix.PadreConfig(A=("identity", "mean+depthwise:kernel=5"))),
    ("poly_sa:positions=mean", "poly_sa:positions=mean", polymix.PolySaConfig(positions="mean")),
])  # fmt: skip
def test_parse_mixer(text, label, config):
    if label is None:  # a 2-D kernel needs the 2-D grid that only the host knows
        with pytest.raises(OptionError, match="kernel_size"):
            parse_mixer(text)
        return
    assert parse_mixer(text) == (label, config)


def test_default_and_yardstick():
    assert list(parse_mixers(DEFAULT)) == [
        "softmax", "padre-2", "padre-3", "pom", "qt", "poly_sa", "poly_nl", "linear_floor",
    ]  # fmt: skip
    assert list(parse_mixers("pom,qt")) == ["softmax", "pom", "qt"], "attention is always what all are compared with"


@pytest.mark.parametrize(("text", "error", "named"), [
    ("pomm", UnknownNameError, "pom"), ("pom:degre=3", OptionError, "degree"), ("pom:degree", OptionError, "option=value"),
    ("pom,,qt", OptionError, "empty"), ("pom,pom", OptionError, "twice"), ("padre:grid=8x8", OptionError, "host decides"),
    ("padre:degree=9", OptionError, "degree"), ("pom:degree=2:degree=3", OptionError, "twice"), ("", OptionError, "--mixers"),
])  # fmt: skip
def test_what_is_not_understood(text, error, named):
    with pytest.raises(error, match=named):
        parse_mixers(text)


def test_options_of_show():
    words = ["dim=192", "grid=64x64", "terms=2", "dropout=0.1", "weight=full", "causal=true", "n=196"]
    options = parse_options(words, polymix.PadreConfig.annotations())
    assert options == {
        "dim": 192, "grid": (64, 64), "terms": (2,), "dropout": 0.1, "weight": "full", "causal": True, "n": 196,
    }  # fmt: skip


@pytest.mark.parametrize(("change", "named"), [
    ({"epochs": 0}, "--epochs"), ({"seeds": 0}, "--seeds"), ({"threads": 0}, "--threads"), ({"dtype": "int8"}, "--dtype"),
    ({"data": "digits", "image_size": 9}, "--patch-size"), ({"patch_size": 0}, "--patch-size"), ({"tokens": ()}, "--tokens"),
    ({"tokens": (64, 64)}, "--tokens"), ({"max_seconds": 0}, "--max-seconds"), ({"mixers": "nothing"}, "nothing"),
])  # fmt: skip
def test_settings_are_checked(change, named):
    with pytest.raises(PolymixError, match=named):
        Settings(**change).check()


def test_quick_is_short():
    quick = Settings(quick=True)
    asked = quick.check()
    assert quick.runs == 1
    assert asked.recipe.epochs <= 8
    assert max(asked.tokens) <= 1024
    assert Settings(quick=True, epochs=2).check().recipe.epochs == 2


@pytest.mark.parametrize(("text", "option", "value"), [
    ("relu_linear:scales=5", "scales", (5,)), ("relu_linear:scales=3,5", "scales", (3, 5)), ("padre:terms=2", "terms", (2,)),
    ("padre:degree=3:terms=3", "terms", (3,)), ("padre:kernel_size=5", "kernel_size", 5), ("hyena:decay=3,15", "decay", (3, 15)),
])  # fmt: skip
def test_a_tuple_of_one_needs_no_comma(text, option, value):
    """EfficientViT's own setting is one scale. An option that is a number or a tuple stays a number."""
    assert getattr(parse_mixer(text)[1], option) == value
