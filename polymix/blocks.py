"""Residual blocks with a mixer and a feed-forward network."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polymix.devices import check_place
from polymix.errors import MAX_TOKENS, OptionError, check_choice, check_int, check_number
from polymix.limits import check_memory
from polymix.mixers import MixerConfig, PomConfig, TokenMixer
from polymix.structured.dense import Dense


def matching_mlp_ratio(mixer: nn.Module, attention: nn.Module, dim: int, mlp_ratio: float = 4.0) -> float:
    """The MLP's width over `dim` with which a block has the parameters of one with attention, to half a hidden unit.

    Args:
        mixer, attention: the two mixers, which may lie on the device "meta". mlp_ratio: of the block with attention.
    Source: PoM, Section 4, which keeps the parameters of its models close to those of the originals.
    """
    spare = sum(p.numel() for p in attention.parameters()) - sum(p.numel() for p in mixer.parameters())
    return max(int(dim * mlp_ratio) + round(spare / (2 * dim + 1)), 1) / dim


class MixerBlock(nn.Module):
    """The transformer block with any mixer in place of attention.

        X ← X + mixer(norm(X)),   X ← X + FF(norm(X)),   FF = Linear, GELU, Linear

    Keyword arguments of `forward` go to the mixer. The feed-forward network costs 2 · mlp_ratio · N D² multiply-adds.

    Args:
        dim: number of channels D.
        mixer: a config, or a mixer of width dim.
        mlp_ratio: width of the hidden layer, divided by dim.
        norm: "layer" for a LayerNorm before each half (pre-norm), None for no norm.
        dropout: probability of zeroing an element after each layer of the feed-forward network, in training.

    Raises:
        OptionError: an option is out of range.
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
        check_int("dim", dim, 1, MAX_TOKENS)
        check_choice("norm", norm, ("layer", None))
        check_number("dropout", dropout, 0.0, 1.0, "a probability in [0, 1)", 0.0)
        check_number("mlp_ratio", mlp_ratio, 1 / dim, math.inf, f"a number of at least 1/dim = 1/{dim}", 4)
        if not isinstance(mixer, (MixerConfig, TokenMixer)):
            raise OptionError("mixer", repr(mixer), "a config or a mixer", "Pass for example PomConfig().")
        if isinstance(mixer, TokenMixer) and mixer.dim != dim:
            got = f"a {mixer.name} of width {mixer.dim}"
            raise OptionError("mixer", got, f"a mixer of width dim={dim}", "Change one of the two, or pass a config.")
        check_place(device, dtype)
        kw: dict[str, Any] = {"device": device, "dtype": dtype}
        hidden = int(dim * mlp_ratio)
        what = f"a feed-forward network of {dim:,} and {hidden:,} channels"
        check_memory("mlp_ratio", what, 8 * dim * hidden, cure="Use a smaller one.")
        self.mixer = mixer.build(dim, **kw) if isinstance(mixer, MixerConfig) else mixer
        self.norm1 = nn.LayerNorm(dim, eps=1e-6, **kw) if norm else nn.Identity()
        self.norm2 = nn.LayerNorm(dim, eps=1e-6, **kw) if norm else nn.Identity()
        self.mlp = nn.Sequential(
            Dense(dim, hidden, **kw), nn.GELU(), nn.Dropout(dropout), Dense(hidden, dim, **kw), nn.Dropout(dropout)
        )

    def forward(self, x: Tensor, **options: Any) -> Tensor:
        x = x + self.mixer(self.norm1(x), **options)
        return x + self.mlp(self.norm2(x))

    def step(self, x: Tensor, state: Any = None, *, causal: bool | int = True) -> tuple[Tensor, Any]:
        """The next token (B, D), or with causal=K the next K (B, K, D), and the new state: see `TokenMixer.step`."""
        y, state = self.mixer.step(self.norm1(x), state, causal=causal)
        x = x + y
        return x + self.mlp(self.norm2(x)), state


class PolyMorpher(MixerBlock):
    """The block of the PoM paper: a MixerBlock with PoM.

        P(X) = X + PoM(X) + FF(X + PoM(X))        (Eq. 3)

    norm=None is the equation as printed; the default adds pre-norms. Options of `PomConfig` (degree, expand, …) are
    passed as keywords. Source: PoM, Eq. 3.
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
