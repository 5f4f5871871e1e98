"""Progressive replacement: in fine-tuning one layer after another gets its mixer, the last one first."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import nn

from polymix.convert import Adapter
from polymix.errors import OptionError, check_int
from polymix.numbers import plural


def schedule(layers: Iterable[str], every: int, steps: int) -> dict[str, int]:
    """After how many steps each layer gets its mixer: the last at once, then one more every `every` steps.

    Args:
        layers: names in the model's order. every: steps between two layers. steps: of the whole training.
    Raises:
        OptionError: the training ends before the first layer's turn.
    """
    check_int("progressive", every, 1)
    plan = {name: place * every for place, name in enumerate(reversed(list(layers)))}
    if (least := max(plan.values()) + 1) > steps:
        got = f"{every} for {plural(len(plan), 'layer')}, in a training of {plural(steps, 'step')}"
        most = (steps - 1) // (len(plan) - 1) if len(plan) > 1 else 0
        cure = f"Train for more epochs{f', or pass {most} or less' if most > 0 else ''}."
        raise OptionError("progressive", got, f"at least {least:,} steps", cure)
    return plan


class StandIns:
    """The original model's attention in the place of mixers whose turn has not come.

    The adapters stay in the model, so that its parameters, their names and the optimizer are those of the whole
    training; only their `forward` is another's for a while.

    Args:
        adapters: by name. teacher: the original model. plan: of `schedule`; empty: no layer waits.
    """

    def __init__(self, adapters: Mapping[str, Adapter], teacher: nn.Module | None, plan: Mapping[str, int]) -> None:
        self.adapters, self.teacher, self.plan = adapters, teacher, plan

    def at(self, step: int) -> dict[str, Adapter]:
        """Let the layers whose turn comes after `step` be attention. Returns the other ones."""
        self.clear()
        for name, first in self.plan.items():
            if step < first and self.teacher is not None:
                vars(self.adapters[name])["forward"] = self.teacher.get_submodule(name).__call__
        return {name: part for name, part in self.adapters.items() if step >= self.plan.get(name, 0)}

    def clear(self) -> None:
        """Let every layer be its mixer."""
        for name in self.plan:
            vars(self.adapters[name]).pop("forward", None)
