"""What `explain` says of a mixer, of a model with several, and what it leaves behind: nothing."""

import pytest
import torch
from torch import nn

import polymix
from polymix import explain
from polymix.errors import CapabilityError, OptionError, PolymixError
from polymix.ops.dispatch import WIDE_CHANNELS
from polymix.ops.native.library import why_not
from tests.helpers import tokens

X = tokens(2, 12, 12, dtype=torch.float32)


def hooks(model):
    return sum(len(part._forward_hooks) + len(part._forward_pre_hooks) for part in model.modules())


@pytest.mark.parametrize("name", ["padre", "pom", "qt", "poly_nl"])
def test_what_ran_and_why(name, monkeypatch):
    monkeypatch.setenv("POLYMIX_NATIVE", "0")
    mixer = polymix.create_mixer(name, 12)
    (trained,) = explain(mixer, X)
    assert (trained.layer, trained.mixer, trained.impl) == ("", name, "eager")
    assert "no backward" in trained.why and "torch.inference_mode()" in trained.why, "the message names the cure"
    with torch.inference_mode():
        (inferred,) = explain(mixer, X)
    assert inferred.impl == "blocked" and "float32 on cpu" in inferred.why
    for impl in ("eager", "triton"):
        (asked,) = explain(polymix.create_mixer(name, 12, impl=impl), X)
        assert (asked.impl, asked.why) == (impl, "requested by name")


@pytest.mark.skipif(why_not() is not None, reason=f"untested: what is said of kernels in C: {why_not()}")
def test_kernels_in_c_are_said_or_why_there_are_none(monkeypatch):
    mixer = polymix.create_mixer("padre", 12)
    for kernels in ("padre", "pom", "qt", "poly_nl"):
        (said,) = explain(polymix.create_mixer(kernels, 12), X)
        assert said.impl == "native" and "float32 on cpu" in said.why
    monkeypatch.setenv("POLYMIX_NATIVE", "0")
    (said,) = explain(mixer, X)
    assert said.impl == "eager" and "native is unavailable: POLYMIX_NATIVE=0 is set" in said.why


def test_a_mixer_with_one_form_alone():
    (only,) = explain(polymix.create_mixer("softmax", 12), X)
    assert (only.mixer, only.impl, only.why) == ("softmax", "eager", "the only implementation")
    with pytest.raises(CapabilityError):
        explain(polymix.create_mixer("pom", 12, impl="blocked"), X)


def test_options_and_arguments_decide(monkeypatch):
    monkeypatch.setenv("POLYMIX_NATIVE", "0")
    pom = polymix.create_mixer("pom", 12)
    with torch.inference_mode():
        assert explain(pom, X)[0].impl == "blocked"
        assert explain(pom, X, causal=3)[0].impl == "eager"
        assert "depthwise" in explain(polymix.create_mixer("padre", 12, token="mean"), X)[0].why


def test_layers_of_a_model_by_name_in_the_order_of_the_calls(monkeypatch):
    monkeypatch.setenv("POLYMIX_NATIVE", "0")
    shared = polymix.create_mixer("qt", 12)
    model = nn.Sequential(
        nn.Linear(12, 12), polymix.create_mixer("pom", 12, impl="eager"),
        nn.Sequential(nn.Identity(), shared), polymix.MixerBlock(12, polymix.create_mixer("poly_nl", 12)), shared,
    )  # fmt: skip
    with torch.inference_mode():
        said = explain(model, X)
    assert [(part.layer, part.mixer, part.impl) for part in said] == [
        ("1", "pom", "eager"), ("2.1", "qt", "blocked"), ("3.mixer", "poly_nl", "blocked"), ("2.1", "qt", "blocked"),
    ]  # fmt: skip
    lines = str(said).splitlines()
    assert (
        len(lines) == 4
        and lines[0] == "1 (pom): eager; requested by name"
        and lines[1].startswith("2.1 (qt): blocked; ")
    )


def test_feature_maps_are_one_call():
    with torch.inference_mode():
        assert len(explain(polymix.create_mixer("poly_nl", 12), torch.randn(2, 12, 3, 4))) == 1


def test_what_is_folded_is_said():
    mixer = polymix.create_mixer("padre", 12).fold()
    with torch.inference_mode():
        (said,) = explain(mixer, X)
    assert said.folded == ("B_1 D_1",) and str(said).endswith("; folded: B_1 D_1")
    assert "folded" not in str(explain(mixer.unfold(), X))


def test_models_without_a_mixer_that_runs_raise():
    for model in (nn.Linear(12, 12), nn.Sequential()):
        with pytest.raises(OptionError, match="model"):
            explain(model, X)

    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.mixer = polymix.create_mixer("pom", 12)

        def forward(self, x):
            return x

    with pytest.raises(OptionError, match="model"):
        explain(Idle(), X)
    with pytest.raises(OptionError, match="no input"):
        explain(Idle())


def test_no_hook_is_left_whatever_happens():
    model = nn.Sequential(polymix.create_mixer("pom", 12), polymix.create_mixer("qt", 12))
    assert hooks(model) == 0
    explain(model, X)
    assert hooks(model) == 0
    with pytest.raises(PolymixError):
        explain(model, X[..., :3])
    with pytest.raises(TypeError):
        explain(model, X, X, X)
    assert hooks(model) == 0
    explain(model, X)


class Careful(nn.Module):
    """Tries one mixer and takes another where that raises."""

    def __init__(self):
        super().__init__()
        self.first = polymix.create_mixer("qt", 12, impl="blocked")
        self.second = polymix.create_mixer("pom", 12, impl="eager")

    def forward(self, x):
        try:
            return self.first(x)
        except CapabilityError:
            return self.second(x)


def test_a_mixer_that_raised_and_was_caught_claims_no_choice_of_another():
    (said,) = explain(Careful(), X)
    assert (said.layer, said.mixer, said.impl, said.why) == ("second", "pom", "eager", "requested by name")


def test_mixers_inside_mixers_are_each_said_once():
    for name in polymix.list_mixers():
        options = {"grid": (3, 4)} if name in ("poly_sa", "tesa", "conv2former", "focused") else {}
        mixer = polymix.create_mixer(name, 12, **options)
        names = [part_name for part_name, part in mixer.named_modules() if isinstance(part, polymix.TokenMixer)]
        with torch.no_grad():
            assert sorted(part.layer for part in explain(mixer, X)) == sorted(names), name


@pytest.mark.skipif(why_not() is not None, reason=f"untested: when kernels in C are chosen: {why_not()}")
@pytest.mark.parametrize(("mixer", "tokens", "dim", "forward", "training"), [
    ("pom", 100, 8, "eager", "eager"), ("pom", 196, 8, "native", "eager"), ("pom", 600, 8, "native", "native"),
    ("poly_nl", 100, 8, "eager", "eager"), ("poly_nl", 196, 8, "native", "eager"),
    ("padre", 16, 8, "native", "native"), ("qt", 16, 8, "native", "native"),
    ("pom", 600, WIDE_CHANNELS, "native", "native"), ("pom", 600, WIDE_CHANNELS + 8, "native", "eager"),
    ("pom", 2048, WIDE_CHANNELS + 8, "native", "native"), ("poly_sa", 600, WIDE_CHANNELS + 8, "native", "native"),
    ("poly_nl", 600, WIDE_CHANNELS + 8, "native", "eager"), ("padre", 16, WIDE_CHANNELS + 8, "native", "native"),
    ("qt", 100, WIDE_CHANNELS + 8, "native", "eager"), ("qt", 196, WIDE_CHANNELS + 8, "native", "native"),
])  # fmt: skip
def test_few_tokens_take_what_was_measured_to_be_fastest(mixer, tokens, dim, forward, training, real_thresholds):
    """The thresholds are those of benchmarks/small_inputs.py; recording gradients has its own, and so have wide tokens."""
    options = {"positions": "mean"} if mixer == "poly_sa" else {}
    built, x = polymix.create_mixer(mixer, dim, **options), torch.randn(1, tokens, dim)
    assert explain(built, x)[0].impl == training
    with torch.no_grad():
        assert explain(built, x)[0].impl == forward
    assert explain(built.requires_grad_(False), x)[0].impl == forward


def test_few_tokens_are_not_worth_blocks(monkeypatch, real_thresholds):
    """Below MIN_TOKENS tokens "auto" keeps plain PyTorch and says so; a name that is asked for runs all the same."""
    monkeypatch.setenv("POLYMIX_NATIVE", "0")
    x = torch.randn(2, 100, 8)
    with torch.inference_mode():
        (said,) = polymix.explain(polymix.create_mixer("pom", 8), x)
        (named,) = polymix.explain(polymix.create_mixer("pom", 8, impl="blocked"), x)
        (many,) = polymix.explain(polymix.create_mixer("pom", 8), x.repeat(3, 1, 1))
    assert said.impl == "eager" and "fewer than 512 tokens" in said.why
    assert named.impl == many.impl == "blocked"
