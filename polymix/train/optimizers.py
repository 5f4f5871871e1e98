"""Parameter groups and learning rates that the domains choose from; the optimizers and schedules are PyTorch's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import OneCycleLR

from polymix.train.recipe import Recipe


def decay_groups(model: nn.Module, recipe: Recipe) -> list[dict[str, Any]]:
    """What learns, with and without weight decay.

    With decay="matrices" vectors have none, nor what a module's `no_weight_decay` names; with "all_but_norms" the
    weights and biases of norms have none; with "all" everything decays.
    """
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    if recipe.decay == "all":
        return [{"params": learning, "weight_decay": recipe.weight_decay}]
    if recipe.decay == "all_but_norms":
        norms = {id(p) for part in model.modules() if "Norm" in type(part).__name__ for p in part.parameters(False)}
        return [{"params": [p for p in learning if (id(p) in norms) == own], "weight_decay": decay}
                for own, decay in ((False, recipe.weight_decay), (True, 0.0))]  # fmt: skip
    exempt = {
        id(parameter)
        for module in model.modules()
        if callable(named := getattr(module, "no_weight_decay", None))
        for name, parameter in module.named_parameters()
        if name in named()
    }
    decayed = [p for p in learning if p.ndim > 1 and id(p) not in exempt]
    rest = [p for p in learning if p.ndim <= 1 or id(p) in exempt]
    return [{"params": decayed, "weight_decay": recipe.weight_decay}, {"params": rest, "weight_decay": 0.0}]


def rated_groups(
    model: nn.Module, recipe: Recipe, prefixes: tuple[str, ...], share: float, others: float = 1.0
) -> list[dict[str, Any]]:
    """`decay_groups`, and the parameters whose names start with a prefix learn at `share` times the rate.

    others: as `share`, of all other parameters.
    """
    named = {id(value) for name, value in model.named_parameters() if name.startswith(prefixes)}
    groups = []
    for group in decay_groups(model, recipe):
        for factor, mine in ((share, True), (others, False)):
            parameters = [value for value in group["params"] if (id(value) in named) == mine]
            if parameters:
                groups.append({**group, "params": parameters, "lr": recipe.learning_rate * factor})
    return groups


def warmup_and_cosine(steps: int, warmup: float, final: float, start: str = "warmup") -> Callable[[int], float]:
    """A step's rate as a share of the highest: a linear rise over a share of the steps, then a cosine to `final`.

    The cosine begins after the rise, or with start="start" at the first step, so that the rise stands for its first
    part and ends where the cosine has already fallen a little, as in timm.
    """
    rising = max(1, round(warmup * steps))
    skipped = rising if start == "warmup" else 0

    def share(step: int) -> float:
        if step < rising - (start == "start"):
            return (step + 1) / rising
        done = (step - skipped + 1) / max(1, steps - skipped)
        return final + (1 - final) * 0.5 * (1 + math.cos(math.pi * min(done, 1.0)))

    return share


def warmup_and_falls(steps: int, warmup: float, milestones: Sequence[float]) -> Callable[[int], float]:
    """A step's rate as a share of the highest: a linear rise, then a tenth after each milestone (a share)."""
    rising = round(warmup * steps)
    falls = [round(share * steps) for share in milestones]

    def share(step: int) -> float:
        if step < rising:
            return (step + 1) / rising
        return 0.1 ** sum(step >= fall for fall in falls)

    return share


def one_cycle(
    optimizer: Optimizer, steps: int, warmup: float, start: float = 1 / 25, final: float = 1 / 25e4
) -> OneCycleLR:
    """OneCycleLR; each group keeps its rate as the highest. The first beta goes from 0.95 to 0.85 and back.

    Args:
        warmup: share of the steps in which the rates rise.
        start, final: rates of the first and the last step, as shares of the highest.
    """
    warmup = 0.99 * warmup if warmup * steps == 1 else warmup  # at one step of it OneCycleLR divides 0 by 0
    return OneCycleLR(
        optimizer, [group["lr"] for group in optimizer.param_groups], total_steps=steps, pct_start=warmup,
        div_factor=1 / start, final_div_factor=start / final if final else math.inf,
    )  # fmt: skip
