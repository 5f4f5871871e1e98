"""`polymix.recommend` from end to end: the advice follows from times, and mistakes are named."""

import math

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import OptionError, PolymixError
from polymix.mixers import PadreConfig, SoftmaxConfig
from polymix.models import VisionTransformer
from polymix.workflows.recommend import recommend
from tests.workflows.recommend.helpers import SplitProjections, contender, near

PAIR = ("padre:degree=2:kernel_size=3", "pom")


@pytest.fixture
def stopwatch(monkeypatch):
    """Every call runs once, and takes what the test says: attention 10 ms, a padre 2, any other 20, a model 100."""
    times = {"attention": 0.010, "model": 0.100, "padre:degree=2:kernel_size=3": 0.002}

    def clock(calls, seconds, device):
        for call in calls.values():
            call()
        return {name: near(times.get(contender(name), 0.020)) for name in calls}

    monkeypatch.setattr("polymix.measure.candidates.interleaved_within", clock)
    monkeypatch.setattr("polymix.workflows.recommend.run.interleaved_within", clock)
    return times


def test_a_model_from_end_to_end(stopwatch):
    model = VisionTransformer(SoftmaxConfig(heads=2), image_size=16, patch_size=4, dim=8, depth=3).train()
    answer = recommend(model, candidates=PAIR, seconds=5.0)
    (layer,) = answer.layers
    assert (layer.action, layer.mixer) == ("replace", PAIR[0])
    assert layer.options == {"kernel_size": 3, "grid": (4, 4)}, "what the mixer needs to be told"
    assert layer.gain == pytest.approx(5.0)
    assert answer.estimate == pytest.approx(0.100 - 3 * 0.008)
    assert layer.wins_from == 4 and sorted(layer.lengths) == [4, 16, 64], "0.25, 1 and 4 times the tokens"
    assert all(part.training for part in model.modules()), "the model is as it was"
    assert all(not part._forward_pre_hooks for part in model.modules())


def advised(model, given, mixer):
    """The recommendation of a model, followed."""
    answer = recommend(model.eval(), input=given, candidates=(mixer, "poly_sa"), seconds=1.0)
    return answer, polymix.convert(model, answer, input=given, copy=True)


def test_convert_follows_a_recommendation(stopwatch):
    stopwatch["padre-2"] = 0.001
    model = VisionTransformer(SoftmaxConfig(heads=2), image_size=16, patch_size=4, dim=8, depth=2)
    parts = list(model.modules())
    answer, report = advised(model, torch.randn(1, 3, 16, 16), "padre:degree=2")
    assert answer.plan() == dict.fromkeys(("blocks.0.mixer", "blocks.1.mixer"), PadreConfig(degree=2))
    assert [layer.now for layer in report.layers] == ["padre", "padre"]
    assert all(a is b for a, b in zip(parts, model.modules(), strict=True)), "the model is as it was"
    stopwatch["padre-2"] = 0.1
    answer, report = advised(model, torch.randn(1, 3, 16, 16), "padre:degree=2")
    assert set(answer.plan().values()) == {"keep"} and not report.adapters


def test_a_plan_has_the_names_of_convert_and_nothing_that_it_refuses(stopwatch):
    stopwatch |= {"padre-2": 0.002, "poly_sa": 0.001}
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
    answer, report = advised(model, torch.randn(1, 16, 8), "padre:degree=2")
    assert [layer.now for layer in report.layers] == ["padre"], "poly_sa needs a grid, which nobody said"
    assert "grid" in answer.layers[0].candidates[1].reason and answer.layers[0].shape.assumed
    alone, x = nn.MultiheadAttention(8, 2, batch_first=True), torch.randn(1, 16, 8)
    answer, report = advised(alone, (x, x, x), "padre:degree=2")
    assert answer.plan() == {"": PadreConfig(degree=2)} and type(report.model) is not type(alone)


def test_a_plan_for_what_convert_does_not_know(stopwatch, monkeypatch):
    with pytest.raises(OptionError, match="shapes"):
        recommend((16, 8), candidates=("pom",), seconds=1.0).plan()
    split = SplitProjections()
    answer = recommend(split, input=torch.randn(1, 6, 8), candidates=("pom",), seconds=1.0)
    assert answer.layers[0].candidates[0].reason is None, "its own input shows how it is read"
    monkeypatch.setattr("polymix.workflows.recommend.layers.attention_layers", lambda model: {})
    answer = recommend(split, input=torch.randn(1, 6, 8), candidates=("pom",), seconds=1.0)
    with pytest.raises(OptionError, match="no adapter"):
        answer.plan()


def test_training_leaves_the_model_alone(stopwatch):
    model = nn.Sequential(nn.BatchNorm1d(9), nn.TransformerEncoderLayer(8, 2, 16, batch_first=True))
    answer = recommend(model, input=torch.randn(2, 9, 8), training=True, candidates=PAIR, seconds=5.0)
    assert answer.layers[0].action == "replace"
    assert model[0].num_batches_tracked == 0 and all(p.grad is None for p in model.parameters())


@pytest.mark.parametrize(("shape", "mixers", "unfit"), [
    ({"causal": True}, ("padre:degree=2:kernel_size=3", "pom", "poly_nl", "poly_sa"), {"poly_nl": "causal", "poly_sa": "causal"}),
    ({"cross": 5}, ("padre:degree=2:kernel_size=3", "pom"), {"padre:degree=2:kernel_size=3": "context"}),
    ({"mask": "arbitrary"}, ("pom", "qt"), {"qt": "mask"}),
])  # fmt: skip
@pytest.mark.parametrize("training", [False, True])
def test_what_a_mixer_cannot_do_is_said(stopwatch, shape, mixers, unfit, training):
    answer = recommend({"tokens": 16, "dim": 8, **shape}, candidates=mixers, training=training, seconds=5.0)
    reasons = {it.mixer: it.reason for it in answer.layers[0].candidates if it.reason}
    assert reasons.keys() == unfit.keys(), reasons
    assert all(word in reasons[mixer] for mixer, word in unfit.items())


def test_an_order_that_is_asked_for_in_the_call_is_said(stopwatch):
    stopwatch["pom"] = 0.001
    answer = recommend({"tokens": 16, "dim": 8, "causal": True}, candidates=PAIR[:1], seconds=1.0)
    assert answer.layers[0].options["causal"] is True and "called with" not in str(answer), "padre is built so"
    answer = recommend({"tokens": 16, "dim": 8, "causal": True}, candidates=("pom",), seconds=1.0)
    assert 'create_mixer("pom", 8), called with causal=True' in str(answer)


def test_a_candidate_that_computes_wrong_has_no_time(stopwatch, monkeypatch):
    monkeypatch.setattr("polymix.mixers.PomMixer.mix", lambda self, x, context, call: x * torch.rand(()))
    answer = recommend((16, 8), candidates=("pom",), seconds=5.0)
    assert "off float64" in answer.layers[0].candidates[0].reason


def test_really_measured():
    answer = recommend([(16, 8), (2, 9, 8)], candidates=("pom",), seconds=0.5, dtype="bfloat16")
    assert [layer.action in ("keep", "replace") for layer in answer.layers] == [True, True]
    assert all(it.timing is not None for layer in answer.layers for it in layer.candidates)
    assert answer.dtype == "bfloat16"


class Opaque(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x):
        return self.attention(x, x, x)[0]


@pytest.mark.parametrize(("what", "options", "named"), [
    (nn.Linear(2, 2), {"input": torch.zeros(1, 2)}, "nn.MultiheadAttention"), (Opaque(), {}, "input"), (Opaque(), {"input": 3}, "input"),
    (Opaque(), {"input": torch.zeros(1, 4, 8), "batch": 2}, "batch"), ((16, 8), {"input": torch.zeros(1)}, "input"),
    ((16,), {}, "shapes"), ([], {}, "shapes"), ("16x8", {}, "shapes"), ((16, 0), {}, "dim"), ({"tokens": 16}, {}, "dim"),
    ({"tokens": 16, "dim": 8, "head": 2}, {}, "heads"), ({"tokens": 16, "dim": 8, "heads": 3}, {}, "heads"),
    ({"tokens": 16, "dim": 8, "grid": (5, 5)}, {}, "grid"), ({"tokens": 16, "dim": 8, "causal": True, "cross": 3}, {}, "causal"),
    ((16, 8), {"device": "cuda:99"}, "device"), ((16, 8), {"device": "meta"}, "device"), ((16, 8), {"dtype": "int8"}, "dtype"),
    ((16, 8), {"dtype": torch.float64}, "dtype"), ((16, 8), {"candidates": "pom"}, "candidates"), ((16, 8), {"candidates": ()}, "candidates"),
    ((16, 8), {"candidates": ("pom", "softmax")}, "candidates"), ((16, 8), {"candidates": ("pomm",)}, "pom"),
    ((16, 8), {"batch": 0}, "batch"), ((16, 8), {"seconds": 0}, "seconds"), ((16, 8), {"seconds": math.nan}, "seconds"),
    ((16, 8), {"threads": 0}, "threads"), ((16, 8), {"training": 1}, "training"),
])  # fmt: skip
def test_errors_name_what_is_wrong(what, options, named):
    with pytest.raises(PolymixError, match=named):
        recommend(what, **options)


def test_threads_are_as_they_were(stopwatch):
    before = torch.get_num_threads()
    recommend((16, 8), candidates=("pom",), threads=before + 1, seconds=1.0)
    assert torch.get_num_threads() == before
