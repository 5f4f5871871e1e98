"""A transformer over the pieces of a puzzle, without positions."""

from __future__ import annotations

from torch import Tensor, nn

from polymix.blocks import MixerBlock
from polymix.tasks.jigsaw.data import Puzzles
from polymix.tasks.jigsaw.recipe import JigsawRecipe


class PuzzleSolver(nn.Module):
    """Pieces (B, n², 3, p, p) in any order to logits (B, n², n²): for each piece, each place.

    Nothing tells the blocks where a piece lies, as it lies there by chance. Attention, pom, poly_nl and qt treat all
    orders of the pieces alike. padre and poly_sa have a weight for each pair of neighbours, and so mix pieces that lie
    side by side by chance.
    """

    def __init__(self, recipe: JigsawRecipe) -> None:
        super().__init__()
        grid = (recipe.pieces, recipe.pieces)
        configs = [config.for_grid(grid, 0) for config in
                   recipe.mixers_for([f"blocks.{place}" for place in range(recipe.depth)]).values()]  # fmt: skip
        self.embed = nn.Linear(3 * recipe.piece_size**2, recipe.dim)
        self.blocks = nn.ModuleList(MixerBlock(recipe.dim, config, mlp_ratio=recipe.mlp_ratio) for config in configs)
        self.calls = [config.call_options(grid) for config in configs]
        self.norm = nn.LayerNorm(recipe.dim)
        self.head = nn.Linear(recipe.dim, recipe.pieces**2)

    def forward(self, pieces: Tensor) -> Tensor:
        x = self.embed(4 * (pieces.flatten(2) - 0.5))
        for block, call in zip(self.blocks, self.calls, strict=True):
            x = block(x, **call)
        return self.head(self.norm(x))


def build(recipe: JigsawRecipe, data: Puzzles) -> PuzzleSolver:
    return PuzzleSolver(recipe)


def check(recipe: JigsawRecipe) -> None:
    """Raise what `build` would raise, before any photograph is read."""
    PuzzleSolver(recipe)


def host_name(recipe: JigsawRecipe) -> str:
    return f"transformer over {recipe.pieces**2} pieces, {recipe.depth} blocks of {recipe.dim} channels"
