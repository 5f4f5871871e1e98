"""What a language model must keep of its past, as synthetic data.

A `Batch` has at every position the token that stands there and the one that must be said after it, or IGNORED.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import check_int, check_number
from polymix.tasks.distill.batches import IGNORED
from polymix.tasks.order import number


class Batch(NamedTuple):
    tokens: Tensor  # (B, N)
    targets: Tensor  # (B, N)


@dataclass(frozen=True)
class Recall:
    """Multi-query associative recall (Arora et al. 2023, "Zoology"): pairs of a key and a value, then the keys again.

    After a key that comes again its value must be said. Keys are distinct tokens below vocab / 2 and values distinct
    tokens from there on; 0 fills the places between the queries. As many places follow as pairs have tokens, and a
    query is drawn into the g-th of them with a weight of g^(power - 1): 0.01 is the paper's, 1 spreads them evenly.
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
        """Positions of a sequence at which something must be said."""
        return self.pairs

    def batch(self, size: int, *seed: Any) -> Batch:
        """`size` sequences, the same for the same `seed`, which may have any number of parts."""
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
    """`span` random tokens, the separator 0, and the same tokens again, each of which must be said before it comes."""

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
        """Positions of a sequence at which something must be said."""
        return self.span

    def batch(self, size: int, *seed: Any) -> Batch:
        """`size` sequences, the same for the same `seed`, which may have any number of parts."""
        text = torch.randint(1, self.vocab, (size, self.span), generator=generator(*seed))
        nothing = torch.full_like(text, IGNORED)
        tokens = torch.cat((text, torch.zeros_like(text[:, :1]), text[:, :-1]), dim=1)
        return Batch(tokens, torch.cat((nothing, text), dim=1))


Task = Recall | Copying


def generator(*seed: Any) -> torch.Generator:
    return torch.Generator().manual_seed(number(*seed))


def distinct(rows: int, of: int, some: int, draw: torch.Generator) -> Tensor:
    """(rows, some) different numbers below `of` in each row."""
    return torch.rand(rows, of, generator=draw).argsort(dim=1)[:, :some]
