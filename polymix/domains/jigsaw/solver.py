"""A transformer over the pieces of a puzzle, without positions."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

from polymix.blocks import MixerBlock
from polymix.mixers import MixerConfig


class PuzzleSolver(nn.Module):
    """Pieces (B, n², 3, p, p) in any order to logits (B, n², n²): for each piece, each place.

    Nothing tells the blocks where a piece lies, as it lies there by chance. Attention, pom, poly_nl and qt treat all
    orders of the pieces alike. padre and poly_sa have a weight for each pair of neighbours, and so mix pieces that lie
    side by side by chance.
    """

    def __init__(
        self, mixers: Sequence[MixerConfig], *, pieces: int, piece_size: int, dim: int, mlp_ratio: float
    ) -> None:
        super().__init__()
        self.options = {  # the arguments that build the same model again
            "mixers": tuple(mixers), "pieces": pieces, "piece_size": piece_size, "dim": dim, "mlp_ratio": mlp_ratio,
        }  # fmt: skip
        grid = (pieces, pieces)
        configs = [config.for_grid(grid, 0) for config in mixers]
        self.embed = nn.Linear(3 * piece_size**2, dim)
        self.blocks = nn.ModuleList(MixerBlock(dim, config, mlp_ratio=mlp_ratio) for config in configs)
        self.calls = [config.call_options(grid) for config in configs]
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, pieces**2)

    def forward(self, pieces: Tensor) -> Tensor:
        x = self.embed(4 * (pieces.flatten(2) - 0.5))
        for block, call in zip(self.blocks, self.calls, strict=True):
            x = block(x, **call)
        return self.head(self.norm(x))
