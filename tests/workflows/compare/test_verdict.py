"""The verdict on comparisons whose answer is known."""

import math
import re

import pytest

from polymix.numbers import two_figures
from polymix.workflows.compare.verdict import (
    answer,
    crossover,
    good_enough,
    latencies,
    noise,
    scores,
    slope,
    uncertainty,
)
from tests.workflows.compare.content import make, row, trained

ATTENTION = [1.0, 2.0, 8.0, 100.0]
GOOD = {"softmax": [0.98, 0.97], "pom": [0.98, 0.975], "qt": [0.97, 0.98], "linear_floor": [0.60, 0.62]}


def speeds(**mixers):
    return {"softmax": ATTENTION, "linear_floor": [0.5] * 4, **mixers}


def test_crossover_is_where_the_lines_cross():
    """pom loses at 16 and 64 by 2 and 1.5, wins at 256 by 2: on the log-log line between 64 and 256."""
    content = make(GOOD, speeds(pom=[2.0, 3.0, 4.0, 5.0], qt=[0.5, 0.6, 0.7, 0.8]))
    table = latencies(content, "alone")
    share = math.log(1.5) / math.log(3.0)
    assert crossover(table, "pom") == pytest.approx(64 * 4**share)
    assert crossover(table, "qt") == 16, "faster from the first count on"


def test_a_win_that_is_lost_again_is_no_crossover():
    content = make(GOOD, speeds(pom=[0.5, 3.0, 4.0, 5.0], qt=[0.5, 0.5, 0.5, 200.0]))
    table = latencies(content, "alone")
    assert crossover(table, "pom") > 64
    assert crossover(table, "qt") is None


def test_where_attention_was_stopped_the_mixer_wins():
    content = make(GOOD, speeds(pom=[2.0, 3.0, 10.0, 20.0], qt=[2.0] * 4))
    content["sweep"] = [r for r in content["sweep"] if not (r["mixer"] == "softmax" and r["tokens"] == 1024)]
    content["sweep"] += [row("softmax", scope, 1024, None) for scope in ("alone", "host")]
    assert crossover(latencies(content, "alone"), "pom") == 1024
    said = answer(content)
    assert said["take"]["1024"] in ("pom", "qt")
    assert any("which attention exceeds" in sentence for sentence in said["sentences"])


def test_a_stopped_mixer_is_no_candidate_there():
    content = make(GOOD, speeds(pom=[0.5] * 4, qt=[0.8] * 4))
    content["sweep"] = [row(*(r["mixer"], r["scope"], r["tokens"], None)) if (r["mixer"], r["tokens"]) == ("pom", 1024) else r
                        for r in content["sweep"]]  # fmt: skip
    assert answer(content)["take"] == {"16": "pom", "64": "pom", "256": "pom", "1024": "qt"}


def test_headline_takes_the_fastest_of_the_accurate():
    content = make({**GOOD, "qt": [0.90, 0.91]}, speeds(pom=[0.5] * 4, qt=[0.1] * 4), own=True)
    said = answer(content)
    assert said["headline"].startswith("At your 16 tokens use pom")
    assert "2 times as fast" in said["headline"]
    assert any("Clearly less accurate than attention: qt (90.5 %)" in s for s in said["sentences"])


def test_headline_keeps_attention_where_nothing_pays():
    content = make(GOOD, speeds(pom=[0.93, 1.8, 1.0, 1.0], qt=[2.0] * 4), own=True)
    said = answer(content)
    assert said["headline"].startswith("At your 16 tokens keep attention")
    assert "pom" in said["headline"]
    assert said["keep_attention"] == [16]
    assert said["take"]["64"] == "pom"
    assert (
        "From 64 tokens on, some mixer is worth it at every measured length. Below 64 tokens keep attention."
        in said["sentences"]
    )


def test_the_default_data_answer_for_the_lengths_that_people_have():
    """They have 16 tokens: what is right there is no answer for anybody's model."""
    said = answer(make(GOOD, speeds(pom=[0.5, 2.0, 4.0, 8.0], qt=[5.0, 5.0, 1.5, 2.0]), tokens=(16, 256, 1024, 4096)))
    assert (
        said["headline"]
        == "At 256 tokens keep attention; at 1,024 and 4,096 tokens use qt: the whole model is 5.33 and 50 times as fast."
    )
    assert said["verdict"]["tokens"] == 4096 and said["verdict"]["mixer"] == "qt"
    assert said["take"]["16"] == "pom" and "digit scenes of 16 tokens" in said["sentences"][0]
    stopped = make(GOOD, speeds(pom=[0.5] * 4, qt=[9.0] * 4))
    stopped["sweep"] = [
        row(r["mixer"], r["scope"], r["tokens"], None) if (r["mixer"], r["tokens"]) == ("softmax", 1024) else r
        for r in stopped["sweep"]
    ]
    assert (
        "at 256 and 1,024 tokens use pom: the whole model stays within the budget"
        in answer(stopped)["headline"].lower()
    )


def test_a_gain_within_the_noise_does_not_pay():
    content = make(GOOD, speeds(pom=[0.9] * 4, qt=[5.0] * 4))
    for r in content["sweep"]:
        if r["mixer"] == "pom" and r["tokens"] == 16:
            r["high"] = 1.3
    assert 16 in answer(content)["keep_attention"]


def test_keep_attention_everywhere():
    content = make(GOOD, speeds(pom=[200.0] * 4, qt=[200.0] * 4))
    said = answer(content)
    assert said["take"] == {}
    assert any("Keep attention at every measured length" in s for s in said["sentences"])
    assert any("never faster than attention" in s for s in said["sentences"])


def test_faster_at_short_lengths_alone_is_not_never():
    content = make(GOOD, speeds(pom=[0.5, 0.5, 0.5, 200.0], qt=[200.0] * 4))
    said = " ".join(answer(content)["sentences"])
    assert "pom alone was never" not in said and "qt alone was never faster" in said
    assert re.search(r"pom alone is not faster than attention at [\d,]+ tokens, the longest length measured", said)


def test_the_floor_is_never_recommended_and_its_accuracy_is_told():
    content = make(
        {**GOOD, "linear_floor": [0.98, 0.98], "pom": [0.5, 0.5], "qt": [0.5, 0.5]}, speeds(pom=[0.5] * 4, qt=[0.5] * 4)
    )
    said = answer(content)
    assert said["take"] == {}
    assert any("without any token mixing" in s for s in said["sentences"])


def test_noise_follows_the_number_of_test_images():
    few, many = (make(GOOD, speeds(pom=[1.0] * 4, qt=[1.0] * 4), test=n) for n in (100, 10**6))
    assert noise(few) == pytest.approx(2 * math.sqrt(2 * 0.975 * 0.025 / 200))
    assert noise(many) == 0.01


def test_what_runs_of_one_mixer_differ_by_makes_nobody_clearly_better():
    """Two standard errors of the test samples alone once called a mixer better whose next seed was worse."""
    values = {**GOOD, "softmax": [0.94, 0.966, 0.965], "pom": [0.97, 0.975, 0.977], "qt": [0.90, 0.91, 0.91]}
    content = make({**values, "linear_floor": [0.5] * 3}, speeds(pom=[0.5] * 4, qt=[0.5] * 4), test=10**6)
    assert [uncertainty(content, "pom", other) for other in ("softmax", "qt")] == pytest.approx([0.026, 0.01])
    said = answer(content)["sentences"]
    assert noise(content) == 0.01 and any(
        "below 1.0 points can be chance, and so can those that the runs" in s for s in said
    )
    assert any("Clearly less accurate than attention: qt" in s for s in said)
    assert not any("Clearly more" in s for s in said)
    assert good_enough(content) == ["pom"], "a mixer is as accurate within the narrower noise"


def test_one_seed_is_no_more_certain_than_the_mixer_that_varies_most():
    """A row of one seed has no range of its own: it was better where a row of three with the same mean was not."""
    values = {**GOOD, "softmax": [0.80, 0.96, 0.95], "pom": [0.97, 0.975, 0.977], "qt": [0.90]}
    content = make({**values, "linear_floor": [0.5] * 3}, speeds(pom=[0.5] * 4, qt=[0.5] * 4), test=10**6)
    assert [uncertainty(content, one, "pom") for one in ("qt", "linear_floor")] == pytest.approx([0.16, 0.01])


def test_divergence_is_said_and_disqualifies():
    content = make({**GOOD, "pom": [0.99, None]}, speeds(pom=[0.1] * 4, qt=[0.5] * 4))
    assert "pom" not in scores(content)
    assert good_enough(content) == ["qt"]
    assert any("Diverged in training (loss became NaN or infinite): pom" in s for s in answer(content)["sentences"])
    dead = make({**GOOD, "softmax": [None, None]}, speeds(pom=[0.1] * 4, qt=[0.5] * 4))
    assert any("Attention itself diverged" in s for s in answer(dead)["sentences"])


def test_an_undertrained_yardstick_is_said():
    content = make({m: [0.5, 0.5] for m in GOOD}, speeds(pom=[0.1] * 4, qt=[0.5] * 4))
    assert any("undertrained" in s for s in answer(content)["sentences"])


def test_the_printed_crossover_of_pom_stands_beside_the_measured_one():
    """PoM, Eq. 11, at d = 192, D = 2 d, k = 2: d + 3."""
    said = answer(make(GOOD, speeds(pom=[2.0, 3.0, 4.0, 5.0], qt=[0.5] * 4)))["sentences"]
    (line,) = [s for s in said if s.startswith("pom alone")]
    assert "from about 110 tokens on" in line
    assert "from 195 tokens on" in line


def test_other_metrics_and_times_of_mixers_alone():
    """A loss, of which less is better, of a task whose model is timed at no other length."""
    content = make(GOOD, speeds(pom=[0.5] * 4, qt=[0.1] * 4))
    values = {"softmax": (3.0, 3.1), "pom": (3.05, 3.1), "qt": (3.5, 3.6), "linear_floor": (5.0, 5.1)}
    content["rows"] = [trained(m, s, v, "val_loss", "down") for m, runs in values.items() for s, v in enumerate(runs)]
    content["data"], content["host"]["tokens"] = None, None
    content["sweep"] = [r for r in content["sweep"] if r["scope"] == "alone"]
    assert noise(content) == pytest.approx(0.1), "the widest range over the seeds"
    assert good_enough(content) == ["pom"]
    said = answer(content)
    assert said["headline"].startswith("By the time of the mixers alone at 1,024 tokens use pom")
    assert said["verdict"]["tokens"] == 1024 and said["take"] == dict.fromkeys(("16", "64", "256", "1024"), "pom")
    assert any("Val loss: attention reaches 3.05 (less is better)" in s for s in said["sentences"])
    assert any("Clearly less accurate than attention: qt (3.55)" in s for s in said["sentences"])
    content["rows"] = [row for row in content["rows"] if row["seed"] == 0]
    assert noise(content) == pytest.approx(0.15) and any("One seed" in s for s in answer(content)["sentences"])


def test_slope():
    assert slope({n: 3.0 * n**1.5 for n in (64, 256, 1024, 4096)}) == pytest.approx(1.5)
    assert slope({64: 1.0}) is None
    assert slope({1: 50.0, 10: 50.0, 100: 1.0, 1000: 10.0, 10_000: 100.0}) == pytest.approx(1.0), (
        "small counts are overhead"
    )


@pytest.mark.parametrize(("n", "text"), [(64, "64"), (131.4, "130"), (1999, "2,000"), (54_321, "54,000"), (7, "7")])
def test_counts_in_sentences_have_two_figures(n, text):
    assert two_figures(n) == text
