"""Convolution with kernels as long as the sequence, by real Fourier transforms: O((N + L) log (N + L)) per row."""

from __future__ import annotations

import torch
from torch import Tensor

from polymix.errors import ShapeError
from polymix.ops.shared.tensors import accumulator, without_autocast


def fft_size(least: int) -> int:
    """The smallest fast transform length (2ᵏ, 3 · 2ᵏ or 5 · 2ᵏ) that is at least `least`."""
    return min(odd << max(0, (-(-least // odd) - 1).bit_length()) for odd in (1, 3, 5))


def causal_fft_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve every row causally: y[n] = Σ_{t < min(L, n + 1)} taps[t] x[n - t].

    The transform mixes all tokens of a row, so the future affects an output through rounding, by about the dtype's
    precision times the largest entry of the row. A NaN or infinity spoils its whole row.

    Args:
        x: (…, N).
        taps: (…, L) with L ≥ 1; the leading axes broadcast with those of x.
    Returns:
        (…, N) in the dtype of x, computed in float32 or wider. Cost: three real transforms of length
        `fft_size(N + min(L, N) - 1)`; rows with the same taps share the transform of the taps. A traced graph cannot
        search for a fast length and uses 2 N if it knows that L ≤ N, else 2 (N + L). Memory: the spectra, about twice
        the padded x.
    Raises:
        ShapeError: x or taps is empty or not real floating point, or they are on different devices.
    """
    _check(x, taps)
    n, length = x.shape[-1], taps.shape[-1]
    if torch.compiler.is_compiling():  # N may be symbolic; comparing it would specialise the graph
        from torch.fx.experimental.symbolic_shapes import statically_known_true

        half = n if statically_known_true(length <= n) else n + length
        return _convolve(x, taps, 2 * half)[..., :n].to(x.dtype)
    taps = taps[..., :n]  # later taps reach no output
    return _convolve(x, taps, fft_size(n + min(length, n) - 1))[..., :n].to(x.dtype)


def circular_fft_conv(x: Tensor, taps: Tensor) -> Tensor:
    """Convolve every row circularly: y[n] = Σ_t taps[t] x[(n - t) mod N].

    This is the product of each row with the circulant matrix whose first column is taps.

    Args:
        x: (…, N).
        taps: (…, L) with L ≤ N, padded with zeros to N; the leading axes broadcast with those of x.
    Returns:
        (…, N) in the dtype of x, computed in float32 or wider. Cost: three real transforms of length N; of length 2 N
        in a traced graph, because torch.export cannot trace the spectrum of a length that may be odd.
    Raises:
        ShapeError: taps is longer than x, either is empty or not real floating point, or the devices differ.
    """
    _check(x, taps)
    if taps.shape[-1] > x.shape[-1]:
        got, allowed = f"{taps.shape[-1]} taps", f"at most N={x.shape[-1]}"
        raise ShapeError("taps", got, allowed, "Add up the taps whose positions are equal modulo N.")
    n = x.shape[-1]
    if torch.compiler.is_compiling():
        line = _convolve(x, taps, 2 * n)
        return (line[..., :n] + line[..., n:]).to(x.dtype)
    return _convolve(x, taps, n).to(x.dtype)


def _convolve(x: Tensor, taps: Tensor, size: int) -> Tensor:
    """The circular convolution of x and taps, both padded with zeros to `size`."""
    dtype = accumulator(torch.promote_types(x.dtype, taps.dtype))
    if not torch.compiler.is_compiling() and 0 in (*x.shape, *taps.shape):  # MKL rejects an empty batch
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
            raise ShapeError(name, got, "a real floating-point tensor (…, N) with N ≥ 1", "")
    if x.device != taps.device:
        allowed = f"a tensor on {x.device}, like x"
        raise ShapeError("taps", f"a tensor on {taps.device}", allowed, "Move it with .to().")
