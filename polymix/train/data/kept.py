"""Samples that are read from files, and kept in memory where they are few."""

from __future__ import annotations

from abc import abstractmethod
from typing import TypeVar

from torch.utils.data import Dataset

Sample = TypeVar("Sample")
IN_MEMORY = 1 << 28  # bytes of samples that are kept


class Kept(Dataset[Sample]):
    """A data set whose samples are read once, if all of them take at most `IN_MEMORY` bytes, else each time.

    size: the bytes of all samples. decoded: those that are kept, by place; None: none is.
    """

    def __init__(self, size: int) -> None:
        self.decoded: dict[int, Sample] | None = {} if size <= IN_MEMORY else None

    @abstractmethod
    def read(self, place: int) -> Sample:
        """The sample at a place, from its files."""

    def __getitem__(self, place: int) -> Sample:
        if self.decoded is None:
            return self.read(place)
        if place not in self.decoded:
            self.decoded[place] = self.read(place)
        return self.decoded[place]
