"""Fitting a new classifier head to labels, so that a pretrained model can teach classes it was not trained on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.convert.tracing import mode, without_fast_path
from polymix.convert.weights import head_of
from polymix.errors import DataError, OptionError
from polymix.train.distill.batches import labels_of, moved, run

_STEPS, _PENALTY = 100, 1e-4


def fit_head(
    model: nn.Module, data: Iterable[Any], *, layers: Sequence[str] | None = None, device: str = "cpu"
) -> float:
    """Fit the head to labels by logistic regression on the features of the frozen model, in place.

    Minimises the mean cross-entropy + 1e-4 ‖W‖² by L-BFGS from W = 0. The model runs once over the data, without
    gradients, and nothing but the head changes. Costs one forward pass and 4 N D bytes, for N inputs of D features.

    Args:
        model: a classifier whose head is one or more linear layers on features (B, D).
        data: batches (inputs, labels), or dicts with `labels`, with one class for each input.
        layers: names of the head's linear layers; None: the model's last linear layer.
        device: where to compute.
    Returns:
        The mean cross-entropy on the data.
    Raises:
        OptionError: a layer is no linear layer, or does not read features (B, D).
        DataError: a batch has no labels, or labels that the head has no class for.
    """
    names = list(layers) if layers is not None else [] if (head := head_of(model)) is None else [head[0]]
    heads: list[Any] = [model.get_submodule(name) for name in names]
    if not heads or not all(isinstance(head, nn.Linear) for head in heads):
        got = f"{type(model).__name__} with {', '.join(names) or 'no linear layer'}"
        raise OptionError("layers", got, "names of linear layers of the model", "")
    seen: list[list[Tensor]] = [[] for _ in heads]
    labels: list[Tensor] = []
    home = next(model.parameters()).device
    model.to(device)
    hooks = [
        head.register_forward_pre_hook(lambda _, args, at=at: seen[at].append(args[0].detach().float()))
        for at, head in enumerate(heads)
    ]
    try:
        with torch.no_grad(), mode(model, False), without_fast_path():
            for batch in data:
                answers = labels_of(batch)
                if answers is None or answers.ndim != 1 or answers.is_floating_point():
                    raise DataError("data", "a batch without a class for each input", "(inputs, labels)", "Add them.")
                run(model, moved(batch, device))
                labels.append(answers.to(device))
    finally:
        for hook in hooks:
            hook.remove()
    target, losses = torch.cat(labels), []
    for name, head, parts in zip(names, heads, seen, strict=True):
        features = torch.cat(parts)
        if features.ndim != 2 or len(features) != len(target):
            raise OptionError("layers", f"{name}, which reads {tuple(features.shape)}", "a head on features (B, D)", "")
        classes = head.weight.shape[0]
        if int(target.max()) >= classes or int(target.min()) < 0:
            raise DataError("data", f"label {int(target.max())}", f"labels from 0 to {classes - 1}", "")
        losses.append(_regress(head, features, target))
    model.to(home)
    return sum(losses) / len(losses)


def _regress(head: Any, features: Tensor, target: Tensor) -> float:
    weight = torch.zeros(head.weight.shape, device=features.device, requires_grad=True)
    bias = torch.zeros(len(weight), device=features.device, requires_grad=head.bias is not None)
    optimizer = torch.optim.LBFGS(
        [weight, bias] if head.bias is not None else [weight], max_iter=_STEPS, line_search_fn="strong_wolfe"
    )

    def loss() -> Tensor:
        optimizer.zero_grad()
        value = F.cross_entropy(features @ weight.t() + bias, target) + _PENALTY * weight.square().sum()
        value.backward()
        return value

    with torch.enable_grad():
        optimizer.step(loss)
    with torch.no_grad():
        head.weight.copy_(weight)
        if head.bias is not None:
            head.bias.copy_(bias)
        return float(F.cross_entropy(features @ weight.t() + bias, target))
