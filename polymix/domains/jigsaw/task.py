"""Jigsaws as a task: cross-entropy between the places and the true place of each piece; each place is taken once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from polymix.domains.jigsaw import data as reading
from polymix.domains.jigsaw import metrics as measuring
from polymix.domains.jigsaw.data import Puzzles
from polymix.domains.jigsaw.recipe import JigsawRecipe
from polymix.domains.jigsaw.solver import PuzzleSolver
from polymix.numbers import percent
from polymix.train.task import Metric, Process, Task


class JigsawTask(Task[JigsawRecipe, Puzzles]):
    """A model of pieces (B, n², 3, p, p) -> (B, n², n²): for each piece, each place."""

    name = "jigsaw"
    metrics = (Metric("in_place", "higher"), Metric("solved", "higher"), Metric("neighbours", "higher"))
    layouts = ("photographs",)
    unit = "puzzles"
    predicts: ClassVar[bool] = True

    def check(self) -> None:
        self._solver()

    def problems(self, source: str) -> list[str]:
        return reading.list_problems(Path(source))

    def load(self, folder: Path) -> Puzzles:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: Puzzles) -> PuzzleSolver:
        return self._solver()

    def _solver(self) -> PuzzleSolver:
        recipe = self.recipe
        mixers = recipe.mixers_for(recipe.block_names(), recipe.dim if recipe.match_parameters else None)
        return PuzzleSolver(
            list(mixers.values()), pieces=recipe.pieces, piece_size=recipe.piece_size, dim=recipe.dim,
            mlp_ratio=recipe.mlp_ratio,
        )  # fmt: skip

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        pieces, places = batch
        return cross_entropy(model(pieces).flatten(0, 1), places.flatten())

    def infer(self, model: nn.Module, batch: Any) -> Any:
        return model(batch[0])

    def measure(self, model: nn.Module, data: Puzzles, process: Process) -> dict[str, float]:
        """`scores` on puzzles of photographs that the training did not see."""
        return measuring.scores(measuring.answers(model, data.test[0], self.recipe, process), data.test[1])

    def draw(self, model: nn.Module, data: Puzzles, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: Puzzles) -> str:
        recipe, number = self.recipe, self.recipe.pieces**2
        return (
            f"{recipe.mixer_name} puts {number} shuffled pieces of {recipe.piece_size} × {recipe.piece_size} pixels in "
            f"place: {len(data.names[0])} photographs for training, {len(data.test[0]):,} puzzles of "
            f"{len(data.names[1])} others for the test. By chance {percent(1 / number)} of the pieces are in place."
        )

    def host_name(self, model: nn.Module) -> str:
        recipe = self.recipe
        return f"transformer over {recipe.pieces**2} pieces, {recipe.depth} blocks of {recipe.dim} channels"

    def from_summary(self, summary: Mapping[str, Any]) -> Puzzles:
        return reading.from_summary(self.recipe)

    def for_evaluation(self, summary: Mapping[str, Any], whole: bool, limit: int | None) -> Puzzles:
        return reading.for_evaluation(self.recipe, whole, limit, self.say)

    def predict(
        self, model: nn.Module, data: Puzzles, files: Sequence[Path], folder: Path, process: Process
    ) -> list[dict[str, Any]]:
        return measuring.predict(model, self.recipe, files, folder, process)
