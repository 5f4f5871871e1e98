"""The grid of a feature map in the calls of a model that are running: one for each thread, and for each nested call."""

from __future__ import annotations

import threading
from typing import Any

import torch

Grid = tuple[int, ...] | None


class RunningGrid(threading.local):
    """The grid that a model's running call has noted; every thread sees its own.

    A call puts the grid of the call around it aside, and returns it at its end, so that a model may be called within
    itself. Copies and pickles of a model start without any.
    """

    def __init__(self) -> None:
        self.grid: Grid = None
        self.outer: list[Grid] = []

    def __reduce__(self) -> tuple[type[RunningGrid], tuple[()]]:
        return RunningGrid, ()

    def enter(self, model: Any, args: Any) -> None:
        """Forward pre-hook on the model."""
        if not torch.compiler.is_compiling():
            self.outer.append(self.grid)
            self.grid = None

    def leave(self, model: Any, args: Any, output: Any) -> None:
        """Forward hook on the model, to be called for calls that raise, too."""
        if not torch.compiler.is_compiling() and self.outer:
            self.grid = self.outer.pop()
