"""FAVOR+, softmax attention by positive random features, with every exponential taken below its own maximum.

    exp(q·k/√d) = E_ω exp(a(q) + b(k)),   a(x) = b(x) = ω·x' - |x'|²/2,   x' = x d^-¼,   ω normal

so attention becomes Σ_m e^{a_im} Σ_j e^{b_jm} v_j over the same with 1 for v_j. A factor that the numerator shares with
the denominator changes nothing: the sum of feature m is kept as e^{top_m} · sums_m with top_m the largest b_jm that it
holds, and query i is scaled by the largest a_im + top_m. Every exponential is then at most 1, and the denominator at
least 1, whatever the logits. In the causal form the maxima are those of the past, so no token depends on its future,
be it by rounding alone.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.causal_sums import hide, in_chunks
from polymix.ops.shared.tensors import accumulator, without_autocast

BLOCK = 16  # tokens, and in turn sums, that are put together directly; more costs N · BLOCK · m exponentials
NONE = -1e30  # the logarithm of no weight at all; finite, so that the difference of two is none either


class PerformerState(NamedTuple):
    """What a recurrent Performer remembers: for each feature e^top · sums = Σ_j e^{b_jm} [v_j, 1]."""

    top: Tensor  # (B, heads, m), float32 at least
    sums: Tensor  # (B, heads, m, d + 1)


def orthogonal_features(count: int, d: int, generator: torch.Generator) -> Tensor:
    """ω (count, d) in float64 on the CPU: normal rows, those of each block of d orthogonal to each other."""
    blocks = []
    kw: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    for _ in range(-(-count // d)):
        normal, length = torch.randn(d, d, **kw), torch.randn(d, d, **kw).norm(dim=1, keepdim=True)
        basis, upper = torch.linalg.qr(normal)
        # LAPACK's choice of signs is not random: left as it is, the mean over ω would not be the exponential.
        blocks.append((basis * upper.diagonal().sign()).t() * length)
    return torch.cat(blocks)[:count]


def relu_features(x: Tensor, omega: Tensor) -> Tensor:
    """relu(ω·x d^-¼) + 0.001, (…, d) -> (…, m) in float32 at least: positive, so that no denominator vanishes."""
    dtype = accumulator(x.dtype)
    with without_autocast(x.device):
        return F.relu((x.to(dtype) * x.shape[-1] ** -0.25) @ omega.to(dtype).t()) + 1e-3


def _logarithms(x: Tensor, omega: Tensor) -> Tensor:
    """ω·x' - |x'|²/2 in float32 at least, (…, d) -> (…, m)."""
    dtype = accumulator(x.dtype)
    x = x.to(dtype) * x.shape[-1] ** -0.25
    return x @ omega.to(dtype).t() - x.square().sum(-1, keepdim=True) / 2


def _keys(k: Tensor, v: Tensor, omega: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """b (B, h, N, m) and [v, 1], of padding no weight and zeros."""
    b = _logarithms(hide(k, mask), omega)
    if mask is not None:
        b = b.masked_fill(~mask[:, None, :, None], NONE)
    return b, hide(F.pad(v.to(b.dtype), (0, 1), value=1.0), mask)


def _divide(sums: Tensor) -> Tensor:
    """Sums of [v, 1] -> their quotient; the denominator is at least 1, or 0 where nothing was seen."""
    return sums[..., :-1] / sums[..., -1:].clamp_min(0.5)


def performer(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """FAVOR+ over all keys: q (B, h, M, d), k and v (B, h, N, d), omega (m, d), mask (B, N) -> (B, h, M, d).

    In the type of v; everything inside is float32 at least. Cost: (M + N) m (2 d + 1) multiply-adds a head.
    """
    with without_autocast(q.device):
        b, values = _keys(k, v, omega, mask)
        top = b.detach().amax(2, keepdim=True)  # (B, h, 1, m)
        sums = (b - top).exp().transpose(-1, -2) @ values
        a = _logarithms(q, omega) + top
        weighted = (a - a.detach().amax(-1, keepdim=True)).exp() @ sums
        return _divide(weighted).to(v.dtype)


def performer_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    *,
    mask: Tensor | None = None,
    state: PerformerState | None = None,
) -> tuple[Tensor, PerformerState]:
    """FAVOR+ over the past of each token and itself, with the state after the last one.

    Args and cost as `performer`, with N · BLOCK exponentials a feature for the pairs within a block of 16 tokens.
    """
    n = q.shape[2]
    size = 1 if n == 1 else BLOCK
    with without_autocast(q.device):
        b, values = _keys(k, v, omega, mask)
        b, values, a = in_chunks(b, size, NONE), in_chunks(values, size), in_chunks(_logarithms(q, omega), size)
        if state is None:
            shape = (*b.shape[:2], b.shape[-1])
            state = PerformerState(b.new_full(shape, NONE), b.new_zeros(*shape, values.shape[-1]))
        top = b.detach().amax(3)  # (B, h, blocks, m)
        sums = (b - top.unsqueeze(3)).exp().transpose(-1, -2) @ values
        before, end = _running(top, sums, state)
        reach = torch.maximum(before.top.unsqueeze(3), b.detach().cummax(3).values)  # the largest b seen by each token
        height = (a.detach() + reach).amax(-1, keepdim=True)  # (B, h, blocks, size, 1)
        past = (a + before.top.unsqueeze(3) - height).exp() @ before.sums
        pairs = (a - height).unsqueeze(4) + b.unsqueeze(3)  # (B, h, blocks, i, j, m)
        future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        inside = pairs.masked_fill(future.unsqueeze(-1), NONE).exp().sum(-1) @ values
        return _divide((past + inside).flatten(2, 3)[:, :, :n]).to(v.dtype), end


def _join(a: PerformerState, b: PerformerState) -> PerformerState:
    """The sums of both, below the larger top of the two."""
    top = torch.maximum(a.top, b.top)
    sums = (part.sums * (part.top - top).exp().unsqueeze(-1) for part in (a, b))
    return PerformerState(top, next(sums) + next(sums))


def _running(top: Tensor, sums: Tensor, start: PerformerState) -> tuple[PerformerState, PerformerState]:
    """What stands before each of T sums (top (B, h, T, m), sums (B, h, T, m, e)), and after the last one.

    In groups of BLOCK: within all groups at once, one sum after another, and before each group by the same on the sums
    of the groups. O(T), and every sum is made of its own past alone: not even a NaN of the future gets in.
    """
    count = top.shape[2]
    if count == 1:
        end = _join(start, PerformerState(top[:, :, 0], sums[:, :, 0]))
        return PerformerState(start.top.unsqueeze(2), start.sums.unsqueeze(2)), end
    tops = in_chunks(top, BLOCK, NONE)  # (B, h, groups, BLOCK, m)
    parts = in_chunks(sums.flatten(-2), BLOCK).unflatten(-1, sums.shape[-2:])
    inner = [PerformerState(torch.full_like(tops[:, :, :, 0], NONE), torch.zeros_like(parts[:, :, :, 0]))]
    for t in range(BLOCK):
        inner.append(_join(inner[-1], PerformerState(tops[:, :, :, t], parts[:, :, :, t])))
    earlier, end = _running(*inner.pop(), start)
    before = _join(
        PerformerState(earlier.top.unsqueeze(3), earlier.sums.unsqueeze(3)),
        PerformerState(torch.stack([part.top for part in inner], 3), torch.stack([part.sums for part in inner], 3)),
    )
    return PerformerState(before.top.flatten(2, 3)[:, :, :count], before.sums.flatten(2, 3)[:, :, :count]), end
