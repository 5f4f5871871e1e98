"""Convolution with kernels as long as the sequence, by the real Fourier transform: O((N + L) log (N + L)) a row."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.errors import ShapeError
from polymix.ops.shared.tensors import accumulator, without_autocast


def fft_size(least: int) -> int:
    """The least transform length of at least `least` that is quick: 2ᵏ, 3 · 2ᵏ or 5 · 2ᵏ."""
    return min(odd << max(0, (-(-least // odd) - 1).bit_length()) for odd in (1, 3, 5))


def causal_fft_conv(x: Tensor, taps: Tensor) -> Tensor:
    """y[n] = Σ_{t < min(L, n + 1)} taps[t] x[n - t], the linear convolution of every row cut to its first N outputs.

    Args:
        x: (…, N). taps: (…, L), any L of at least 1; the leading axes broadcast.
    Returns:
        (…, N) in the type of x, computed in float32 at least.

    Each output is a sum over the whole transform, so the future reaches it by rounding: of the order of the type's
    precision times the largest entry of the row, and a NaN or infinity anywhere in a row spoils all of that row.
    Cost: three real transforms of `fft_size(N + min(L, N) - 1)` places, the one of taps once for all rows that share
    them; in a traced graph, which cannot search for a quick size, of 2 N where it knows that L ≤ N, else of 2 (N + L).
    Memory: the spectra, about twice x and its padding.
    """
    _check(x, taps)
    n, length = x.shape[-1], taps.shape[-1]
    if torch.compiler.is_compiling():  # N may be symbolic: a comparison would tie the graph to one outcome
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        half = n if statically_known_true(length <= n) else n + length
        return _convolve(x, taps, 2 * half)[..., :n].to(x.dtype)
    taps = taps[..., :n]  # no output reads the rest
    return _convolve(x, taps, fft_size(n + min(length, n) - 1))[..., :n].to(x.dtype)


def circular_fft_conv(x: Tensor, taps: Tensor) -> Tensor:
    """y[n] = Σ_t taps[t] x[(n - t) mod N]: the product of every row with a circulant matrix whose first column is taps.

    Args:
        x: (…, N). taps: (…, L) with L ≤ N, zeros after; the leading axes broadcast.
    Returns:
        (…, N) in the type of x, computed in float32 at least. Cost: three real transforms of N places; of 2 N in a
        traced graph, where torch.export cannot follow the spectrum of an N that may be odd.
    Raises:
        ShapeError: where taps is longer than x.
    """
    _check(x, taps)
    if taps.shape[-1] > x.shape[-1]:
        got, allowed = f"{taps.shape[-1]} taps", f"at most N={x.shape[-1]}"
        raise ShapeError("taps", got, allowed, "A circle of N places has no room for more: add up those that meet.")
    n = x.shape[-1]
    if torch.compiler.is_compiling():
        line = _convolve(x, taps, 2 * n)
        return (line[..., :n] + line[..., n:]).to(x.dtype)
    return _convolve(x, taps, n).to(x.dtype)


def _convolve(x: Tensor, taps: Tensor, size: int) -> Tensor:
    """The circular convolution of both padded with zeros to `size`."""
    dtype = accumulator(torch.promote_types(x.dtype, taps.dtype))
    if not torch.compiler.is_compiling() and 0 in (*x.shape, *taps.shape):  # an empty batch, which MKL refuses
        return (
            (x[..., :1] * taps[..., :1]).to(dtype).expand(*torch.broadcast_shapes(x.shape[:-1], taps.shape[:-1]), size)
        )
    with without_autocast(x.device):
        spectrum = torch.fft.rfft(x.to(dtype), n=size) * torch.fft.rfft(taps.to(dtype), n=size)
        return torch.fft.irfft(spectrum, n=size)


def _check(x: Tensor, taps: Tensor) -> None:
    for name, value in (("x", x), ("taps", taps)):
        if not value.is_floating_point() or value.ndim == 0 or value.shape[-1] == 0:
            got = f"{tuple(value.shape)} of {value.dtype}"
            raise ShapeError(name, got, "real floating-point numbers (…, N) with N ≥ 1", "")
    if x.device != taps.device:
        raise ShapeError("taps", f"a tensor on {taps.device}", f"one on {x.device}, where x is", "Move it with .to().")
