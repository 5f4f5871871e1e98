"""Decisions and advice follow from times alone."""

import json

import pytest

from polymix.measure.timing import Timing
from polymix.mixers import PadreConfig
from polymix.workflows.recommend import Candidate, Shape
from polymix.workflows.recommend.advice import LayerAdvice, Recommendation
from polymix.workflows.recommend.decide import choose, gain, worth_it
from polymix.workflows.verdict import wins_from
from tests.workflows.recommend.helpers import near

MACHINE = {"gpu": None, "cpu": "a CPU", "threads": 1}


def advice(attention, *times, names=(), lengths=None):
    mixers = [Candidate(f"m{i}", PadreConfig(degree=i + 1), time) for i, time in enumerate(times)]
    return LayerAdvice(
        names, "Attention", Shape(tokens=16, dim=8, grid=(4, 4)), attention, tuple(mixers), lengths or {}
    )


def test_the_fastest_beyond_the_noise_is_chosen():
    fast, faster = Candidate("a", timing=near(0.5)), Candidate("b", timing=near(0.2))
    assert choose(near(1.0), [fast, faster, Candidate("c", reason="unfit")]) is faster
    assert choose(near(1.0), [fast, Candidate("b", timing=near(0.2, spread=5.0))]) is fast, "a scattered one is no gain"


@pytest.mark.parametrize(("attention", "candidate", "worth"), [
    (near(1.0), near(0.5), True), (near(1.0, spread=0.001), near(0.97, spread=0.001), False), (near(1.0, spread=0.001), near(0.926, spread=0.001), False),
    (near(1.0, spread=0.3), near(0.9, spread=0.3), False), (near(1.0), near(1.5), False),
    (Timing((1.0,)), near(0.6), False), (Timing((1.0,)), near(0.4), True), (None, near(9.0), True), (near(1.0), None, False),
])  # fmt: skip
def test_worth_it_needs_ten_per_cent_and_ranges_apart(attention, candidate, worth):
    """3 or 8 % is too little, ranges that overlap are noise, one run must win twice over, attention without memory loses."""
    assert worth_it(attention, Candidate("m", timing=candidate)) is worth


def test_gain_spans_what_the_runs_allow():
    middle, low, high = gain(near(1.0), Candidate("m", timing=near(0.5)))
    assert middle == pytest.approx(2.0)
    assert low == pytest.approx(0.98 / 0.51) and high == pytest.approx(1.02 / 0.49), "10 % and 90 % against each other"


def test_wins_from_is_the_start_of_an_unbroken_run():
    assert wins_from({64: True, 256: False, 1024: True, 4096: True}) == 1024
    assert wins_from({64: True, 256: False}) is None


def test_keep_everywhere_is_an_answer():
    answer = Recommendation((advice(near(1.0), near(2.0)),), None, "float32", False, MACHINE)
    assert answer.headline.startswith("Keep attention everywhere")
    assert answer.layers[0].action == "keep"
    assert answer.layers[0].gain == pytest.approx(0.5), "how far the fastest is from it"
    assert answer.layers[0].mixer is None
    assert "accuracy" in str(answer)


def test_the_model_gains_what_its_layers_save():
    layers = (advice(near(0.010), near(0.004), names=("a", "b", "c")), advice(near(0.001), near(0.002), names=("d",)))
    answer = Recommendation(layers, near(0.100), "float32", False, MACHINE)
    assert answer.estimate == pytest.approx(0.100 - 3 * 0.006), "one saving a call, none where attention is kept"
    assert "3 of 4 layers" in answer.headline and "estimate" in answer.headline
    impossible = Recommendation(layers, near(0.001), "float32", False, MACHINE)
    assert impossible.estimate == pytest.approx(3 * 0.004), "never less than the mixers alone"


def test_the_table_fits_and_the_dict_is_json():
    names = tuple(f"transformer.encoder.layers.{i}.attention.self" for i in range(48))
    long = Candidate("padre:degree=3:token=monarch:blocks=8:heads=4", PadreConfig(), near(0.00123), folded=True)
    layer = LayerAdvice(names, "VeryLongNameOfAnAttention", Shape(tokens=65536, dim=1024, grid=(256, 256), heads=16, batch=64),
                        near(12.3456), (long, Candidate("poly_nl", reason="word " * 60)), {16384: False, 65536: True})  # fmt: skip
    answer = Recommendation((layer,), near(300.0), "bfloat16", True, MACHINE, ("a note " * 40,))
    assert max(map(len, str(answer).splitlines())) <= 96
    assert "65,536 tokens on" in str(answer) and ".fold()" in str(answer)
    content = json.loads(json.dumps(answer.to_dict(), allow_nan=False))
    assert content["layers"][0]["wins_from"] == 65536
    assert content["layers"][0]["candidates"][1]["reason"]
