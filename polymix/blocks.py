"""The residual blocks that hold a mixer."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.mixers import MixerConfig, PomConfig, TokenMixer
from polymix.structured.dense import Dense


class MixerBlock(nn.Module):
    """X ← X + mixer(norm(X)), then X ← X + FF(norm(X)): the transformer block with any mixer in attention's place.

    FF is two linear layers with a GELU between. `norm` "layer" puts a LayerNorm before each half (pre-norm, as in the
    hosts), None none. The keyword arguments of forward go to the mixer. Cost beside the mixer's: 2 · mlp_ratio · N D².
    """

    def __init__(
        self,
        dim: int,
        mixer: MixerConfig | TokenMixer,
        *,
        mlp_ratio: float = 4.0,
        norm: str | None = "layer",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("dim", dim, 1)
        check_choice("norm", norm, ("layer", None))
        check_number("dropout", dropout, 0.0, 1.0, "a probability in [0, 1)", 0.0)
        check_number("mlp_ratio", mlp_ratio, 1 / dim, math.inf, "a number that leaves a hidden channel", 4)
        if not isinstance(mixer, (MixerConfig, TokenMixer)):
            raise OptionError("mixer", repr(mixer), "a config or a mixer", "Pass PomConfig(), say.")
        kw: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = int(dim * mlp_ratio)
        self.mixer = mixer.build(dim, **kw) if isinstance(mixer, MixerConfig) else mixer
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **kw) if norm else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **kw) if norm else nn.Identity()
        self.mlp = nn.Sequential(
            Dense(dim, hidden, **kw), nn.GELU(), nn.Dropout(dropout), Dense(hidden, dim, **kw), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.mixer(self.norm1(x), **options)
        return x + self.mlp(self.norm2(x))


class PolyMorpher(MixerBlock):
    """P(X) = X + PoM(X) + FF(X + PoM(X)) (PoM, Eq. 3), with the host's pre-norm; norm=None is the equation as printed.

    Options of `PomConfig` (degree, expand, …) are keywords of their own.
    """

    def __init__(
        self,
        dim: int,
        *,
        mlp_ratio: float = 4.0,
        norm: str | None = "layer",
        dropout: float = 0.0,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        **pom: Any,
    ) -> None:
        config = PomConfig().changed(dropout=dropout, **pom)
        super().__init__(dim, config, mlp_ratio=mlp_ratio, norm=norm, dropout=dropout, device=device, dtype=dtype)
