"""What fine-tuning minimises: a model's answers to a batch against its labels and the original model's answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from polymix.errors import DataError
from polymix.train.distill.batches import LOSSES, Answer, Forward, answers_of, logits_of, plain
from polymix.train.distill.pieces import as_they_are, carried, cut, fresh_cache


class Compared(NamedTuple):
    """The loss of a batch; where there are classes, how many answers are right, of how many rows."""

    loss: Tensor
    hits: int | None = None
    rows: int = 0


class Comparison:
    """w_labels · cross-entropy + w_teacher · T² KL(teacher ‖ model), or mean squares: see `loss` of `distill`.

    Args:
        labels, teacher: the weights. temperature: T. piece: tokens that are computed at a time; None: all.
    """

    def __init__(
        self, labels: float, teacher: float, temperature: float = 1.0, *, forward: Forward = logits_of,
        loss: str = LOSSES[0], piece: int | None = None,
    ) -> None:  # fmt: skip
        self.weights, self.temperature, self.forward, self.piece = (labels, teacher), temperature, forward, piece
        self.answer: Any = answers_of(loss)

    def __call__(self, model: nn.Module, teachers: Sequence[nn.Module], batch: Any) -> Compared:
        """Compare a model with the original one, the only one of `teachers`, or with labels alone, without one."""
        batch = plain(batch)
        if self.piece is not None:
            return self._in_pieces(model, teachers, batch, self.piece)
        ours = self.answer(model, batch, self.forward)
        with torch.no_grad():
            theirs = [self.answer(teacher, batch, self.forward) for teacher in teachers]
        loss, hits = self._of(ours, theirs)
        return Compared(loss) if hits is None else Compared(loss, int(hits), int(ours.real.sum()))

    def _in_pieces(
        self, model: nn.Module, teachers: Sequence[nn.Module], batch: dict[str, Any], piece: int
    ) -> Compared:
        """The mean loss over a batch of sequences that are computed piece by piece."""
        call = as_they_are if self.forward is logits_of else self.forward
        caches: list[Any] = [fresh_cache(each) for each in (model, *teachers)]
        sums, rows, right, classes = [], 0, 0, False
        for part in cut(model, batch, piece, self.forward):

            def answered(place: int, each: nn.Module, part: Any = part, before: Any = tuple(caches)) -> Any:
                caches[place] = carried(before[place])
                return self.answer(each, {**part, "past_key_values": caches[place], "use_cache": True}, call)

            with torch.no_grad():
                theirs = [answered(place, teacher) for place, teacher in enumerate(teachers, 1)]

            def compared(theirs: Any = theirs, answered: Any = answered) -> tuple[Tensor, Tensor | None, Tensor]:
                ours = answered(0, model)
                return *self._of(ours, theirs), ours.real.sum()

            loss, hits, count = checkpoint(compared, use_reentrant=False)
            if int(count):
                sums.append(loss * count)
                rows += int(count)
            if hits is not None:
                right, classes = right + int(hits), True
        return Compared(torch.stack(sums).sum() / rows if sums else loss, right if classes else None, rows)

    def _of(self, ours: Any, theirs: Sequence[Any]) -> tuple[Tensor, Tensor | None]:
        """The loss of a model's answers, and how many of them are right, where there are classes."""
        by_label, by_teacher = self.weights
        parts = [by_label * ours.label_loss()] if by_label and ours.labels is not None else []
        hits = None
        if isinstance(ours, Answer) and ours.labels is not None and ours.labels.ndim == 1:
            hits = (ours.logits.argmax(-1) == ours.labels)[ours.real].sum()
        parts += [by_teacher * ours.teacher_loss(each, self.temperature) for each in theirs]
        if not parts:
            got = "a batch without labels, and no teacher"
            raise DataError("data", got, "labels in every batch", "Pass teacher=1.0, say.")
        return torch.stack(parts).sum(), hits
