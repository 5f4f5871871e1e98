"""Convolutions as long as the sequence, by FFT: circulant and causal Toeplitz, with explicit or implicit taps."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, check_choice, check_int
from polymix.ops.shared.fft_conv import causal_fft_conv, circular_fft_conv
from polymix.ops.shared.sequences import after_window, next_window
from polymix.ops.shared.tensors import Shape, accumulator
from polymix.structured.base import Site, StructuredMap, init_
from polymix.structured.cost import Op, linear_op

POSITION_UNIT = 1024  # unit of an implicit filter's positions if the length of sequences is unknown


class ImplicitFilter(nn.Module):
    """Taps as a function of position: h_c(t) = exp(-λ_c t) (W_2 sin(ω ⊙ W_1 f(t)))_c, f: sines and cosines of t.

    t is in units of `length`, so the same weights give a filter with any number of taps. At init the energy Σ_t h(t)²
    over `length` taps is 1.
    """

    def __init__(self, copies: int, length: int, *, bands: int = 8, width: int = 16, **kw: Any) -> None:
        super().__init__()
        self.length, self.bands = length, bands
        self.into = nn.Linear(1 + 2 * bands, width, **kw)
        self.frequency = nn.Parameter(torch.ones(width, **kw))
        self.out = nn.Linear(width, copies, bias=False, **kw)
        # from taps that fade over the whole length to taps that fade within a hundredth of it
        self.log_decay = nn.Parameter(torch.linspace(0.0, math.log(100.0), copies, **kw))
        init_(self.out.weight, width)
        with torch.no_grad():
            self.out.weight.div_(self(length).float().square().sum(-1, keepdim=True).sqrt().to(self.out.weight))

    def forward(self, n: int) -> Tensor:
        """(copies, n)."""
        like = self.frequency
        t = torch.arange(n, device=like.device, dtype=accumulator(like.dtype)).unsqueeze(-1) / self.length
        angle = 2 * math.pi * t * torch.arange(self.bands, device=like.device)
        features = torch.cat((t, angle.cos(), angle.sin()), dim=-1).to(like.dtype)
        curve = self.out(torch.sin(self.frequency * self.into(features)))
        return (curve * torch.exp(-t * self.log_decay.exp()).to(curve.dtype)).t()

    def cost_ops(self, n: int) -> list[Op]:
        return [linear_op(n, self.into), linear_op(n, self.out)]


class _Filtered(StructuredMap):
    """A filter per channel, or per group with `shared` (always, on the channel side).

    filter: "explicit" (`length` taps; all others are zero), "implicit" (a curve in units of `length`), or None for
    explicit if a length is known. length: None for the number of tokens of the mixer, or 1,024 for a curve.
    """

    fixed = False
    on_grid = True

    def __init__(
        self, site: Site, *, filter: str | None = None, length: int | None = None, shared: bool = False, **kw: Any
    ) -> None:
        super().__init__(site)
        check_choice("filter", filter, (None, "explicit", "implicit"))
        check_choice("shared", shared, (True, False))
        if site.side == "channel" and shared:
            raise OptionError(
                "shared", shared, "False on the channel side, which always has a filter per group", "Leave it out."
            )
        length = site.size if length is None else length
        if filter is None:
            filter = "implicit" if length is None else "explicit"
        if length is None and filter == "implicit":
            length = POSITION_UNIT
        if length is None:
            raise OptionError(
                "length",
                length,
                f"the number of taps of {self.kind}, as the sequence length is unknown",
                "Pass length=64.",
            )
        check_int("length", length, 1)
        self.length = length
        self.copies = site.groups if shared or site.side == "channel" else site.channels
        self.weight: nn.Parameter | None = None
        self.curve: ImplicitFilter | None = None
        if filter == "explicit":
            self.weight = nn.Parameter(torch.empty(self.copies, length, **kw))
            init_(self.weight, length)
        else:
            self.curve = ImplicitFilter(self.copies, length, **kw)

    def taps(self, n: int) -> Tensor:
        """The taps (copies, L) for a sequence of n entries, which may use fewer."""
        if self.curve is not None:
            return self.curve(n)
        assert self.weight is not None
        return self.weight

    def beside(self, v: Tensor) -> Tensor:
        """The taps, shaped for v (…, G, R, n): a filter for each of its channels, or for each group."""
        return self.taps(v.shape[-1]).unflatten(0, (self.site.groups, -1))

    def vector_ops(self, rows: int, n: int, out: int) -> list[Op]:
        transforms = Op("fft", (2 * rows * self.site.groups + self.copies, self.transform_size(n)))
        return [transforms] if self.curve is None else [*self.curve.cost_ops(n), transforms]

    def transform_size(self, n: int) -> int:
        return n

    def scale_(self, gain: float) -> bool:
        weight = self.weight if self.curve is None else self.curve.out.weight
        assert weight is not None
        weight.data.mul_(gain)
        return True

    def extra_repr(self) -> str:
        form = "explicit" if self.curve is None else "implicit"
        return f"{super().extra_repr()}, filter={form}, length={self.length}"


class Circulant(_Filtered):
    """M_ij = h[(i - j) mod n]: a convolution that wraps around. Taps beyond n are not used.

    Cost: O(n log n) per vector.
    """

    kind = "circulant"

    def taps(self, n: int) -> Tensor:
        taps = super().taps(n)
        # exactly n taps, missing ones zero; N may be symbolic
        return taps if self.curve is not None else at_lag(taps, torch.arange(n, device=taps.device))

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        if transposed:  # Mᵀ is M on the reversed sequence
            return circular_fft_conv(v.flip(-1), self.beside(v)).flip(-1)
        return circular_fft_conv(v, self.beside(v))

    def matrix(self, n: int, out: int) -> Tensor:
        lag = (torch.arange(n)[:, None] - torch.arange(n)) % n
        return at_lag(self.taps(n), lag)


class Toeplitz(_Filtered):
    """M_ij = h[i - j] for i ≥ j, else 0: a causal convolution.

    It uses an FFT, so it is causal up to rounding: a later token a million times larger shows in earlier outputs, and
    a NaN spreads to the whole sequence. Use depthwise if that must not happen. At init, outputs grow along the
    sequence.

    Cost: O(n log n) per vector.
    State: the last length - 1 tokens (causal mixers with explicit taps).
    """

    kind = "toeplitz"
    causal_form = True

    @property
    def recurrent(self) -> bool:
        return self.site.causal and self.curve is None

    def multiply(self, v: Tensor, *, transposed: bool, out: int, real: Tensor | None) -> Tensor:
        if transposed:
            return causal_fft_conv(v.flip(-1), self.beside(v)).flip(-1)
        return causal_fft_conv(v, self.beside(v))

    def matrix(self, n: int, out: int) -> Tensor:
        return at_lag(self.taps(n), torch.arange(n)[:, None] - torch.arange(n))

    def transform_size(self, n: int) -> int:
        return 2 * n

    def memory(self, batch: int) -> list[Shape]:
        return [(batch, self.length - 1, self.site.channels)]

    def scan(self, x: Tensor, past: list[Tensor], real: Tensor | None) -> tuple[Tensor, list[Tensor]]:
        if real is not None:
            x = x.masked_fill(~real.unsqueeze(-1), 0.0)
        seen = after_window(x, past[0])
        y = self.act(seen.to(x.dtype), None, None, out=None, transposed=False)[:, self.length - 1 :]
        return y, [next_window(seen, x.shape[1], real)]


def at_lag(taps: Tensor, lag: Tensor) -> Tensor:
    """taps[…, lag], or 0 where there is no such tap."""
    lag = lag.to(taps.device)
    inside = (lag >= 0) & (lag < taps.shape[-1])
    return taps[..., torch.where(inside, lag, 0)] * inside.to(taps)
