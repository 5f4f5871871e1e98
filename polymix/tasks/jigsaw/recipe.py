"""The options of the jigsaw task."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import check_choice, check_int, check_number
from polymix.mixers import MixerConfig
from polymix.tasks.recipe import TaskRecipe


@dataclass(frozen=True)
class JigsawRecipe(TaskRecipe):
    """Put the shuffled pieces of a photograph in place. `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder of photographs, or one with train and val; None: photographs that come with scikit-image and
            scikit-learn.
        mixer: of every block, as on the command line: "pom", "padre:degree=3".
        pieces: along a side; a puzzle has pieces² of them.
        piece_size: side of a piece, in pixels.
        dim, depth, mlp_ratio: channels, blocks, and hidden units of the MLP per channel.
        match_parameters: choose the mixer's width so that it has as many parameters as attention.
        test_puzzles: crops of unseen photographs that are measured.
    """

    batch_size: int = 64
    steps: int = 1500
    learning_rate: float = 2e-3
    warmup: float = 0.1
    final: float = 0.0
    evaluate_every: int = 500
    checkpoint_every: int = 500
    log_every: int = 100
    mixer: str = "pom"
    pieces: int = 4
    piece_size: int = 8
    dim: int = 64
    depth: int = 4
    mlp_ratio: float = 2.0
    match_parameters: bool = False
    test_puzzles: int = 500

    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "dim": 16, "depth": 1, "pieces": 2, "piece_size": 4, "batch_size": 8, "test_puzzles": 16},
    }
    takes_plan: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_int("pieces", self.pieces, 2, 32)
        check_int("piece_size", self.piece_size, 2, 256)
        for name in ("dim", "depth", "test_puzzles"):
            check_int(name, getattr(self, name), 1)
        check_number("mlp_ratio", self.mlp_ratio, 1 / self.dim, math.inf, "a number that leaves a hidden unit", 2)
        check_choice("match_parameters", self.match_parameters, (True, False))
        self.mixers()

    def mixers(self) -> list[MixerConfig]:
        """The mixer of each block."""
        layers = [f"blocks.{place}" for place in range(self.depth)]
        return list(self.mixers_for(layers, self.dim if self.match_parameters else None).values())

    @property
    def side(self) -> int:
        """Of a puzzle, in pixels."""
        return self.pieces * self.piece_size
