"""How far a model's output is from the original's."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.convert.tracing import mode, tensors
from polymix.workflows.search.candidates import Installer

KINDS = {
    "logits": "Kullback-Leibler divergence from the original's probabilities, in nats",
    "features": "squared error of the last features, as a share of their variance",
    "squares": "squared error of the output, as a share of its variance",
}
CARRIES = 0.02  # share of log(classes) below which outputs say nothing of the inputs


def kind_of(model: nn.Module, batch: Any) -> str:
    """What a model puts out: logits, where it says so or returns (B, C) of its last linear layer; else features."""
    from polymix.convert.weights import head_of
    from polymix.train.distill.batches import run

    with torch.no_grad(), mode(model, False):
        output = run(model, batch)
    if hasattr(output, "logits"):
        return "logits"
    head = head_of(model)
    classes = isinstance(output, Tensor) and output.ndim == 2 and head is not None
    return "logits" if classes and head is not None and output.shape[1] == head[1].out_features else "features"


class Damage:
    """The mean over all answers of KL(original ‖ model), or ‖ŷ − y‖² / ‖y − ȳ‖² where outputs are no logits.

    Args:
        host: the original model. batches: without labels, on the CPU. kind: one of KINDS.
        memory: bytes of the original's answers that are held; above that they are computed again each time.
    """

    def __init__(
        self, host: nn.Module, batches: Sequence[Any], kind: str, forward: Callable[..., Tensor], memory: float
    ) -> None:
        from polymix.train.distill.batches import answers_of

        self.host, self.batches, self.kind, self.forward = host, batches, kind, forward
        self.device = next(host.parameters()).device
        self.read: Any = answers_of(kind)
        held: list[Any] = []
        size, squares, total, count = 0, 0.0, 0.0, 0
        for batch in batches:
            theirs = self._answer(host, batch)
            if kind != "logits":
                values = theirs.values.double()
                squares, total = squares + float(values.square().sum()), total + float(values.sum())
                count += values.numel()
            size += sum(part.numel() * part.element_size() for part in tensors(tuple(theirs)))
            held = [*held, theirs] if size <= memory else []
        self.held = held if size <= memory else []
        mean = total / max(count, 1)
        self.variance = max(squares / max(count, 1) - mean**2, 1e-12)

    @torch.no_grad()
    def _answer(self, model: nn.Module, batch: Any) -> Any:
        from polymix.train.distill.batches import moved

        with mode(model, False):
            return self.read(model, moved(batch, self.device), self.forward)

    def __call__(self, install: Installer, share: float = 1.0) -> float:
        """Of the model with some mixers in it, on a share of the batches; infinite where its output is not finite."""
        total, count = 0.0, 0
        for place, batch in enumerate(self.batches[: math.ceil(share * len(self.batches))]):
            theirs = self.held[place] if self.held else self._answer(self.host, batch)
            with install() as model:
                ours = self._answer(model, batch)
            if self.kind == "logits":
                rows = int(ours.real.sum())
                total, count = total + float(ours.teacher_loss(theirs, 1.0)) * rows, count + rows
            else:
                rows = ours.values.numel()
                total += float(ours.teacher_loss(theirs, 1.0)) / self.variance * rows
                count += rows
        value = total / max(count, 1)
        return max(value, 0.0) if math.isfinite(value) else math.inf

    def information(self) -> float | None:
        """How much the original's logits tell of the inputs: mean KL(pᵢ ‖ p̄) / log C. None: they are no logits."""
        if self.kind != "logits":
            return None
        answers = self.held or [self._answer(self.host, self.batches[0])]
        logs = torch.cat([each.logits[each.real][:4096] for each in answers])[:4096].log_softmax(-1)
        mean = logs.exp().mean(0).clamp_min(1e-30).log()
        return float((logs.exp() * (logs - mean)).sum(-1).mean()) / math.log(max(logs.shape[-1], 2))
