"""The knapsack against all plans there are."""

import itertools
import random

import pytest

from polymix.workflows.search.knapsack import Front, by_rule, damage_of, near_front, shortest


def problem(seed):
    """Up to five layers with up to four candidates; equal times and damages occur, and sums are exact in binary."""
    draw = random.Random(seed)
    return {
        f"layer {layer}": {
            f"mixer {place}": (draw.randint(0, 20), draw.randint(0, 40) / 64) for place in range(draw.randint(1, 4))
        }
        for layer in range(draw.randint(1, 5))
    }


def every_plan(options):
    for choice in itertools.product(*options.values()):
        plan = dict(zip(options, choice, strict=True))
        yield plan, sum(options[layer][name][0] for layer, name in plan.items()), damage_of(plan, options)


@pytest.mark.parametrize("seed", range(60))
def test_the_least_damage_within_every_budget_is_that_of_all_plans(seed):
    options, most = problem(seed), 60
    front, plans = Front.of(options, most), list(every_plan(options))
    for budget in range(most + 1):
        damages = [damage for _, time, damage in plans if time <= budget]
        least = front.least(budget)
        assert (least is None) == (not damages)
        if least is not None:
            time, damage = least
            plan = front.plan(time)
            assert damage == min(damages) == damage_of(plan, options)
            assert time == sum(options[layer][name][0] for layer, name in plan.items()) <= budget


@pytest.mark.parametrize("seed", range(20))
def test_the_front_has_each_plan_that_no_other_beats(seed):
    options = problem(seed)
    plans = {(time, damage) for _, time, damage in every_plan(options)}
    best = {
        time for time, damage in plans
        if not any(t <= time and d <= damage for t, d in plans if (t, d) != (time, damage))
    }  # fmt: skip
    points = Front.of(options, 100).points()
    assert [time for time, _ in points] == sorted(best)
    assert points[0][0] == shortest(options)


def test_what_is_near_the_front_is_in_some_good_plan():
    """A candidate that costs more and harms more than another is trained for nothing."""
    good, bad, keep = (40_000, 0.1), (45_000, 5.0), (50_000, 0.0)
    options = {name: {"good": good, "bad": bad, "keep": keep} for name in "ab"}
    assert near_front(options, [90_000]) == {(name, choice) for name in "ab" for choice in ("good", "keep")}


def test_rules_replace_as_few_layers_as_the_budget_needs():
    options = {str(place): {"keep": (25, 0.0), "qt": (10, 1.0)} for place in range(4)}
    chosen = {rule: by_rule(rule, "qt", options, "keep", 70) for rule in ("last {}", "first {}", "{} evenly spaced")}
    assert [[*plan.values()] for plan in chosen.values()] == [
        ["keep", "keep", "qt", "qt"], ["qt", "qt", "keep", "keep"], ["keep", "qt", "keep", "qt"]
    ]  # fmt: skip
    assert by_rule("last {}", "qt", options, "keep", 30) is None
