"""The options of a training that puts the pieces of photographs in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

from pydantic import Field

from polymix.train.recipe import (
    BatchSize,
    CheckpointEvery,
    Count,
    EvaluateEvery,
    Final,
    LearningRate,
    LogEvery,
    Positive,
    Recipe,
    Steps,
)


class JigsawRecipe(Recipe):
    """A transformer that puts the shuffled pieces of a photograph in place.

    The data are a folder of photographs, or one with train and val; without one they are the photographs that come
    with scikit-image and scikit-learn.
    """

    task: ClassVar[str] = "polymix.domains.jigsaw.task:JigsawTask"
    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {
            "steps": 4,
            "evaluate_every": 4,
            "dim": 16,
            "depth": 1,
            "pieces": 2,
            "piece_size": 4,
            "batch_size": 8,
            "test_puzzles": 16,
        },
    }

    batch_size: BatchSize = 64
    steps: Steps = 3000
    learning_rate: LearningRate = 2e-3
    final: Final = 0.0
    evaluate_every: EvaluateEvery = 500
    checkpoint_every: CheckpointEvery = 500
    log_every: LogEvery = 100
    match_parameters: bool = Field(False, description="size the mixer so that it has as many parameters as attention")
    pieces: int = Field(2, ge=2, le=32, description="along a side; a puzzle has pieces² of them")
    piece_size: int = Field(8, ge=2, le=256, description="side of a piece in pixels")
    dim: Count = Field(64, description="channels")
    depth: Count = Field(4, description="blocks")
    mlp_ratio: Positive = Field(2.0, description="hidden units of the MLP per channel")
    test_puzzles: Count = Field(500, description="crops of unseen photographs that are measured")

    @property
    def side(self) -> int:
        """Of a puzzle, in pixels."""
        return self.pieces * self.piece_size
