"""Synthetic data for recall and copying: what a language model must keep of its past.

A `Batch` has the token at each position, and the token that must follow it, or IGNORED.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import check_int, check_number
from polymix.train.data.sampling import Slices, number
from polymix.train.task import IGNORED, Data


class Batch(NamedTuple):
    tokens: Tensor  # (B, N)
    targets: Tensor  # (B, N)


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (Arora et al. 2023, "Zoology"): pairs of a key and a value, then the keys again.

    After a repeated key the model must predict its value. Keys are distinct tokens below vocab / 2, values distinct
    tokens from there on, and 0 fills the positions between the queries. The second half has as many positions as the
    pairs; a query falls on its g-th position with weight g^(power - 1). The paper has power 0.01; 1 is uniform.
    """

    pairs: int
    vocab: int = 256
    power: float = 0.01

    def __post_init__(self) -> None:
        check_int("vocab", self.vocab, 4)
        check_int("pairs", self.pairs, 1, self.vocab // 2 - 1)
        check_number("power", self.power, 0.0, 10.0, "a number from 0 to 10", 0.01)

    @property
    def length(self) -> int:
        return 4 * self.pairs

    @property
    def answers(self) -> int:
        """Positions of a sequence that have a target."""
        return self.pairs

    def batch(self, size: int, *seed: Any) -> Batch:
        """`size` sequences. They depend on the parts of `seed` alone."""
        draw, half, shown = generator(*seed), self.vocab // 2, 2 * self.pairs
        keys = 1 + distinct(size, half - 1, self.pairs, draw)
        values = half + distinct(size, self.vocab - half, self.pairs, draw)
        weights = torch.arange(1, shown + 1, dtype=torch.float64) ** (self.power - 1)
        places = shown + torch.multinomial(weights.expand(size, -1), self.pairs, generator=draw)
        tokens = torch.zeros(size, self.length, dtype=torch.int64)
        tokens[:, 0:shown:2], tokens[:, 1:shown:2] = keys, values
        tokens.scatter_(1, places, keys)
        return Batch(tokens, torch.full_like(tokens, IGNORED).scatter_(1, places, values))


@dataclass(frozen=True)
class Copying:
    """`span` random tokens, the separator 0, and the same tokens again, each of which must be predicted."""

    span: int
    vocab: int = 256

    def __post_init__(self) -> None:
        check_int("vocab", self.vocab, 2)
        check_int("span", self.span, 1)

    @property
    def length(self) -> int:
        return 2 * self.span

    @property
    def answers(self) -> int:
        """Positions of a sequence that have a target."""
        return self.span

    def batch(self, size: int, *seed: Any) -> Batch:
        """`size` sequences. They depend on the parts of `seed` alone."""
        text = torch.randint(1, self.vocab, (size, self.span), generator=generator(*seed))
        nothing = torch.full_like(text, IGNORED)
        tokens = torch.cat((text, torch.zeros_like(text[:, :1]), text[:, :-1]), dim=1)
        return Batch(tokens, torch.cat((nothing, text), dim=1))


Question = Recall | Copying


def stream(questions: Sequence[Question], tokens: int, seed: int, slices: Slices) -> Iterator[Batch]:
    """One process's slices of batches of the questions in turn, without end. They depend on seed and step alone.

    tokens: of a step, in as many sequences as fit, a multiple of the slices.
    """
    for step in count(slices.step):
        question = questions[step % len(questions)]
        size = max(slices.total, tokens // question.length // slices.total * slices.total)
        whole = question.batch(size, "train", seed, step)
        for which in slices.mine:
            mine = slice(which, None, slices.total)
            yield Batch(whole.tokens[mine], whole.targets[mine])


@dataclass(frozen=True)
class Questions(Data):
    """The questions of a recipe, one of each size. Their sequences are made as they are needed."""

    questions: tuple[Question, ...]

    def fingerprint(self) -> str:
        """Differs between questions."""
        return repr(self.questions)


def generator(*seed: Any) -> torch.Generator:
    return torch.Generator().manual_seed(number(*seed))


def distinct(rows: int, of: int, some: int, draw: torch.Generator) -> Tensor:
    """(rows, some) numbers below `of`, distinct in each row."""
    return torch.rand(rows, of, generator=draw).argsort(dim=1)[:, :some]
