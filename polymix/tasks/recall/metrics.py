"""How much a model recalls, and how many numbers it keeps for it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polymix._io import write_whole
from polymix.errors import check_int
from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.processes import Process
from polymix.tasks.recall.data import Streamed, Task
from polymix.tasks.recall.recipe import RecallRecipe


def measure(model: nn.Module, data: Streamed, recipe: RecallRecipe, process: Process) -> dict[str, float]:
    """Accuracy over all sizes, and for each size."""
    found = [accuracy(model, task, seed=recipe.seed, answers=recipe.answers) for task in data.tasks]
    return {
        "accuracy": sum(found) / len(found),
        **{f"accuracy_{n}": a for n, a in zip(recipe.sizes, found, strict=True)},
    }


def draw(model: nn.Module, data: Streamed, recipe: RecallRecipe, folder: Path) -> list[Path]:
    """recall.png: accuracy by number of pairs, or of tokens to copy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    found = [accuracy(model, task, seed=recipe.seed, answers=recipe.answers) for task in data.tasks]
    axes.plot(list(recipe.sizes), found, marker="o", label="model")
    if recipe.task == "recall":
        axes.plot(list(recipe.sizes), [1 / n for n in recipe.sizes], ":", label="a guess among the values seen")
    axes.set(xlabel="pairs" if recipe.task == "recall" else "tokens to copy", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.legend(frameon=False)
    path = folder / "recall.png"
    write_whole(path, lambda part: figure.savefig(part, dpi=130, format="png"))
    return [path]


def describe(recipe: RecallRecipe, data: Streamed) -> str:
    """What the model was trained on, for the report."""
    what = "pairs to recall" if recipe.task == "recall" else "tokens to copy"
    return f"{', '.join(recipe.mixers)}, on {', '.join(map(str, recipe.sizes))} {what}, a vocabulary of {recipe.vocab}."


@torch.no_grad()
def accuracy(model: nn.Module, task: Task, *, seed: int = 0, answers: int = 2048) -> float:
    """The share of right answers to about `answers` questions that are not in the training data."""
    check_int("answers", answers, 1)
    training = model.training
    tokens, targets = task.batch(max(1, answers // task.answers), "test", seed)
    place, asked = next(model.parameters()).device, targets != IGNORED
    answered = model.eval()(tokens.to(place)).logits.argmax(-1).cpu()
    model.train(training)
    return (answered[asked] == targets[asked]).float().mean().item()


def state_size(model: nn.Module, task: Task) -> list[int]:
    """How many numbers each layer of a model of polymix.models.language keeps after a sequence of the task."""
    with torch.no_grad():
        tokens = task.batch(1, "state").tokens.to(next(model.parameters()).device)
        cache = model(tokens, use_cache=True).past_key_values
    kept = (getattr(layer, "state", None) or (layer.keys, layer.values) for layer in cache.layers)
    return [sum(part.numel() for part in tree_leaves(state) if isinstance(part, Tensor)) for state in kept]
