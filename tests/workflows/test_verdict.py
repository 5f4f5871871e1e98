"""The one rule by which compare, recommend and convert judge: a table of cases with the sentences that they get."""

import itertools
import json
import math
import re

import pytest

from polymix.workflows.verdict import KEEP, MIN_GAIN, OPEN, REPLACE, Contender, Speed, judge, span, wins_from

INF = math.inf
SAME, BETTER, WORSE = (-0.02, 0.02), (0.01, 0.05), (-0.08, -0.04)


def mixer(gain, low=None, high=None, accuracy=SAME, name="pom", one_run=False):
    low, high = gain * 0.98 if low is None else low, gain * 1.02 if high is None else high
    return Contender(name, {196: Speed(gain, low, high, one_run)}, accuracy)


# (contenders, action, why, the sentence after "At 196 tokens ")
CASES = {
    "twice as fast": ([mixer(2.0)], REPLACE, "faster", "use pom: the model is as accurate as with attention, and is 2 times as fast."),
    "just enough": ([mixer(1.1, 1.02, 1.2)], REPLACE, "faster", "use pom: the model is as accurate as with attention, and is 1.1 times as fast."),
    "more accurate too": ([mixer(3.0, accuracy=BETTER)], REPLACE, "faster", "use pom: the model is more accurate than with attention, and is 3 times as fast."),
    "accuracy not measured": ([mixer(2.5, accuracy=None)], REPLACE, "faster", "use pom: it is 2.5 times as fast."),
    "attention exceeds the budget": ([mixer(INF, INF, INF)], REPLACE, "faster",
        "use pom: the model is as accurate as with attention, and stays within the budget, which attention exceeds."),
    "attention out of memory": ([mixer(INF, INF, INF, None)], REPLACE, "faster", "use pom: it stays within the budget, which attention exceeds."),
    "the faster of two": ([mixer(2.0), mixer(3.0, name="qt")], REPLACE, "faster", "use qt: the model is as accurate as with attention, and is 3 times as fast."),
    "the faster is noisy": ([mixer(2.0), mixer(4.03, 0.9, 6.0, name="padre")], REPLACE, "faster", "use pom: the model is as accurate as with attention, and is 2 times as fast."),
    "the faster is less accurate": ([mixer(2.0), mixer(9.0, accuracy=WORSE, name="qt")], REPLACE, "faster", "use pom: the model is as accurate as with attention, and is 2 times as fast."),
    "accuracy just reaches": ([mixer(2.0, accuracy=(-0.03, 0.0))], REPLACE, "faster", "use pom: the model is as accurate as with attention, and is 2 times as fast."),
    "fast but noisy": ([mixer(4.03, 0.9, 6.0, name="padre")], OPEN, "unclear",
        "the choice is open: padre is as accurate and measured 4.03 times as fast, but its runs vary from 0.9 to 6 times. Measure again on an idle machine."),
    "fast but noisy, no accuracy": ([mixer(1.5, 0.9, 3.0, None)], OPEN, "unclear",
        "the choice is open: pom measured 1.5 times as fast, but its runs vary from 0.9 to 3 times. Measure again on an idle machine."),
    "even, but all over the place": ([mixer(1.02, 0.2, 5.0)], OPEN, "unclear",
        "the choice is open: pom is as accurate and measured 1.02 times as fast, but its runs vary from 0.2 to 5 times. Measure again on an idle machine."),
    "noisy beside one that is slower": ([mixer(0.5, name="qt"), mixer(1.3, 0.8, 2.0)], OPEN, "unclear",
        "the choice is open: pom is as accurate and measured 1.3 times as fast, but its runs vary from 0.8 to 2 times. Measure again on an idle machine."),
    "a single run": ([mixer(1.6, one_run=True)], OPEN, "unclear",
        "the choice is open: pom is as accurate and measured 1.6 times as fast, but in a single run, which counts only from 2 times on. Measure for longer."),
    "a single run, twice as fast": ([mixer(2.2, one_run=True)], REPLACE, "faster", "use pom: the model is as accurate as with attention, and is 2.2 times as fast."),
    "a single run, half as fast": ([mixer(0.4, one_run=True)], KEEP, "slower",
        "keep attention: the fastest mixer that is as accurate, pom, takes 2.5 times as long."),
    "slightly faster": ([mixer(1.05, 1.03, 1.07)], KEEP, "similar", "keep attention: the fastest mixer that is as accurate, pom, is about as fast (1.05 times)."),
    "slightly slower": ([mixer(0.95)], KEEP, "similar", "keep attention: the fastest mixer that is as accurate, pom, is about as fast (0.95 times)."),
    "equal": ([mixer(1.0)], KEEP, "similar", "keep attention: the fastest mixer that is as accurate, pom, is about as fast (1.00 times)."),
    "slower": ([mixer(0.5)], KEEP, "slower", "keep attention: the fastest mixer that is as accurate, pom, takes 2 times as long."),
    "much slower": ([mixer(0.004)], KEEP, "slower", "keep attention: the fastest mixer that is as accurate, pom, takes 250 times as long."),
    "slower, no accuracy": ([mixer(0.8, accuracy=None)], KEEP, "slower", "keep attention: the fastest mixer, pom, takes 1.25 times as long."),
    "slower and noisy": ([mixer(0.7, 0.4, 1.2)], KEEP, "unclear", "keep attention: the fastest mixer that is as accurate, pom, takes 1.43 times as long, but its runs vary from 0.4 to 1.2 times."),
    "the less slow of two": ([mixer(0.2, name="qt"), mixer(0.6)], KEEP, "slower", "keep attention: the fastest mixer that is as accurate, pom, takes 1.67 times as long."),
    "all less accurate": ([mixer(5.0, accuracy=WORSE), mixer(7.0, accuracy=WORSE, name="qt")], KEEP, "less accurate", "keep attention: no mixer that was measured is as accurate."),
    "less accurate and slow": ([mixer(0.5, accuracy=WORSE)], KEEP, "less accurate", "keep attention: no mixer that was measured is as accurate."),
    "the accurate one was stopped": ([mixer(5.0, accuracy=WORSE), Contender("qt", {64: Speed(2, 2, 2)}, SAME)], KEEP, "less accurate",
        "keep attention: no mixer that was measured is as accurate."),
    "all stopped": ([Contender("qt", {64: Speed(2, 2, 2)}, SAME)], KEEP, "not measured", "keep attention: no mixer could be measured."),
    "no mixers": ([], KEEP, "not measured", "keep attention: no mixer could be measured."),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_verdicts(name):
    contenders, action, why, sentence = CASES[name]
    its = judge(contenders, 196)
    print(its.sentence)
    assert (its.action, its.why, its.sentence) == (action, why, f"At 196 tokens {sentence}")
    assert json.loads(json.dumps(its.to_dict(), allow_nan=False))["action"] == action


def test_without_a_reference_nothing_is_recommended():
    its = judge([mixer(5.0)], 196, reference=False)
    assert (its.action, its.why, its.mixer) == (OPEN, "no reference", None)
    assert "attention itself diverged" in its.sentence


def test_the_sentence_begins_where_it_is_said():
    assert judge([mixer(2.0)], 196, "On this input").sentence.startswith("On this input use pom")


def test_no_sentence_contradicts_itself_or_its_data():
    """Whatever is measured: "keep" names no clear gain, "use" no loss or doubt, and the data agree with the words."""
    gains = (0.01, 0.5, 0.9, 0.95, 1.0, 1.05, 1.1, 1.5, 4.03, 300.0, INF)
    spreads = ((1.0, 1.0), (0.98, 1.02), (0.5, 1.5), (0.1, 10.0))
    cases = [
        mixer(gain, gain * low, gain * high, accuracy, one_run=one_run)
        for gain, (low, high), accuracy, one_run in itertools.product(gains, spreads, (None, SAME, BETTER, WORSE), (False, True))
    ]  # fmt: skip
    for pair in itertools.product(cases, cases[:: len(cases) // 40]):
        first, second = pair[0], Contender("qt", pair[1].speeds, pair[1].accuracy)
        its = judge([first, second], 196)
        text = its.sentence
        faster = [float(number.replace(",", "")) for number in re.findall(r"([\d.,]+) times as fast", text)]
        if its.action == KEEP:
            assert all(number < MIN_GAIN for number in faster), text
            assert "use " not in text
        if its.action == REPLACE:
            assert "keep" not in text and "vary" not in text and "times as long" not in text, text
            assert its.speed.gain >= MIN_GAIN and (its.speed.low > 1 or its.speed.one_run), text
            winner = {it.name: it for it in (first, second)}[its.mixer]
            assert winner.accurate
        if its.action == OPEN:
            assert "Measure " in text, "what to do about it"
        assert "inf" not in text and "nan" not in text and "e+" not in text, text


@pytest.mark.parametrize(("wins", "words"), [
    ({17: True}, "at 17 tokens, the only length measured"),
    ({17: False}, "at 17 tokens, the only length measured"),
    ({17: True, 65: True}, "at every measured length (17 and 65 tokens)"),
    ({17: False, 65: False}, "at any measured length (17 and 65 tokens)"),
    ({17: False, 65: True, 257: True}, "from 65 tokens on (measured: 17, 65 and 257)"),
    ({17: False, 65: True}, "from 65 tokens on (measured: 17 and 65)"),
    ({17: True, 65: False}, "only at 17 tokens (measured: 17 and 65)"),
    ({16: True, 64: False, 1024: True}, "only at 16 and 1,024 tokens (measured: 16, 64 and 1,024)"),
    ({16: True, 64: True, 1024: False}, "only at 16 and 64 tokens (measured: 16, 64 and 1,024)"),
])  # fmt: skip
def test_lengths_in_words(wins, words):
    print(words)
    assert span(wins) == words


def test_no_length_is_claimed_that_was_not_measured():
    for outcomes in itertools.product((False, True), repeat=4):
        wins = dict(zip((16, 64, 256, 1024), outcomes, strict=True))
        text = span(wins)
        assert {int(n.replace(",", "")) for n in re.findall(r"[\d,]*\d", text)} <= set(wins)
        start = wins_from(wins)
        assert ("from" in text) <= (start is not None), text
    assert all(" on" not in span({n: won}).replace(" only", "") for n in (1, 17) for won in (True, False)), (
        "one length is no trend"
    )
