"""The best plan within a budget, exactly: a knapsack over layers, by dynamic programming over whole units of time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

UNITS = 100_000  # the attention's time; a layer's time is rounded down to a whole number of units
_COARSE = 20  # units in one, where thousands of knapsacks are solved
SLACK = 2.0  # a candidate is near the front if a plan with it does at most so many times the least damage
Pair = tuple[str, str]  # a layer and a mixer
Options = Mapping[str, Mapping[str, tuple[int, float]]]  # layer -> candidate -> (time in units, damage)


@dataclass(frozen=True)
class Front:
    """The least damage Σ dₗ of plans that take exactly so many units of time, for each number of them.

    best: (T + 1) float64, infinite where no plan takes that long. choices: for each layer the place of its candidate in
    the best plan so far. options: what was chosen from.
    """

    best: torch.Tensor
    choices: Sequence[torch.Tensor]
    options: Options

    @classmethod
    def of(cls, options: Options, limit: int = UNITS) -> Front:
        """Solve it for all times up to `limit`. Takes O(limit · candidates)."""
        best = torch.full((limit + 1,), math.inf, dtype=torch.float64)
        best[0] = 0.0
        choices = []
        for candidates in options.values():
            after, choice = torch.full_like(best, math.inf), torch.full((limit + 1,), -1, dtype=torch.int16)
            for place, (time, damage) in enumerate(candidates.values()):
                if time <= limit:
                    offered = best[: limit + 1 - time] + damage
                    better = offered < after[time:]
                    after[time:][better] = offered[better]
                    choice[time:][better] = place
            best = after
            choices.append(choice)
        return cls(best, choices, options)

    def least(self, limit: int) -> tuple[int, float] | None:
        """The shortest of the best plans that take at most `limit` units: its time and damage. None: there is none."""
        part = self.best[: max(limit, 0) + 1]
        damage = float(part.min())
        return None if math.isinf(damage) else (int((part == damage).nonzero()[0]), damage)

    def plan(self, time: int) -> dict[str, str]:
        """The candidate of each layer in the best plan that takes exactly so long."""
        plan: dict[str, str] = {}
        for (layer, candidates), choice in reversed([*zip(self.options.items(), self.choices, strict=True)]):
            plan[layer] = [*candidates][int(choice[time])]
            time -= candidates[plan[layer]][0]
        return {layer: plan[layer] for layer in self.options}

    def points(self) -> list[tuple[int, float]]:
        """Time and damage of each plan that no other beats in one without losing in the other; the shortest first."""
        lowest = torch.cat([torch.full((1,), math.inf, dtype=torch.float64), self.best.cummin(0).values[:-1]])
        return [(int(time), float(self.best[time])) for time in (self.best < lowest).nonzero().flatten()]


def shortest(options: Options) -> int:
    """The time of the fastest plan."""
    return sum(min(time for time, _ in candidates.values()) for candidates in options.values())


def near_front(options: Options, budgets: Sequence[int]) -> set[Pair]:
    """The pairs that some good plan has: within a budget, it does at most `SLACK` times the least damage."""
    coarse = {
        layer: {name: (time // _COARSE, damage) for name, (time, damage) in candidates.items()}
        for layer, candidates in options.items()
    }
    limit = max(budgets) // _COARSE
    goals = {budget // _COARSE: Front.of(coarse, limit).least(budget // _COARSE) for budget in budgets}
    near = set()
    for layer, candidates in coarse.items():
        for name, item in candidates.items():
            forced = Front.of({**coarse, layer: {name: item}}, limit)
            for budget, goal in goals.items():
                reached = forced.least(budget)
                if goal is not None and reached is not None and reached[1] <= SLACK * goal[1]:
                    near.add((layer, name))
    return near


# The fixed rules that are typed today

RULES: dict[str, Callable[[int, int, int], bool]] = {  # whether a layer, the count-th of total, is one of so many
    "last {}": lambda place, count, total: place >= total - count,
    "first {}": lambda place, count, total: place < count,
    "{} evenly spaced": lambda place, count, total: place * count // total < (place + 1) * count // total,
}


def by_rule(rule: str, mixer: str, options: Options, keep: str, limit: int) -> dict[str, str] | None:
    """One mixer in as few layers as a rule needs for a plan of at most `limit` units. None: it has no such plan."""
    total = len(options)
    for count in range(total + 1):
        plan = {layer: mixer if RULES[rule](place, count, total) else keep for place, layer in enumerate(options)}
        times = [options[layer].get(choice, (limit + 1,))[0] for layer, choice in plan.items()]
        if sum(times) <= limit:
            return plan
    return None


def damage_of(plan: Mapping[str, str], options: Options) -> float:
    """The sum of the damages of each replacement alone."""
    return sum(options[layer][choice][1] for layer, choice in plan.items())
