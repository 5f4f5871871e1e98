"""How much a model recalls, and how many numbers it keeps for it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from polymix.domains.recall.data import Question
from polymix.errors import check_int
from polymix.train.data.drawing import save_figure
from polymix.train.task import IGNORED


def draw(path: Path, question: str, sizes: Sequence[int], accuracies: Sequence[float]) -> Path:
    """A picture of the accuracy by number of pairs, or of tokens to copy."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5, 3.6), layout="constrained")
    axes = figure.subplots()
    axes.plot(list(sizes), accuracies, marker="o", label="model")
    if question == "recall":
        axes.plot(list(sizes), [1 / n for n in sizes], ":", label="a guess among the values seen")
    axes.set(xlabel="pairs" if question == "recall" else "tokens to copy", ylabel="accuracy", ylim=(-0.03, 1.03))
    axes.legend(frameon=False)
    save_figure(path, figure)
    return path


@torch.no_grad()
def accuracy(model: nn.Module, question: Question, *, seed: int = 0, answers: int = 2048) -> float:
    """The share of right answers to about `answers` questions that are not in the training data."""
    check_int("answers", answers, 1)
    training = model.training
    tokens, targets = question.batch(max(1, answers // question.answers), "test", seed)
    place, asked = next(model.parameters()).device, targets != IGNORED
    answered = model.eval()(tokens.to(place)).logits.argmax(-1).cpu()
    model.train(training)
    return (answered[asked] == targets[asked]).float().mean().item()


def state_size(model: nn.Module, question: Question) -> list[int]:
    """How many numbers each layer of a model of polymix.models.language keeps after a sequence of the question."""
    with torch.no_grad():
        tokens = question.batch(1, "state").tokens.to(next(model.parameters()).device)
        cache = model(tokens, use_cache=True).past_key_values
    states = (getattr(layer, "state", None) or (layer.keys, layer.values) for layer in cache.layers)
    return [sum(part.numel() for part in tree_leaves(state) if isinstance(part, Tensor)) for state in states]
