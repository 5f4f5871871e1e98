"""FAVOR+: softmax attention by positive random features, with exponentials that cannot overflow (Performer).

    exp(q·k/√d) = E_ω exp(a(q) + b(k)),   a(x) = b(x) = ω·x' - |x'|²/2,   x' = x d^-¼,   ω normal

Attention becomes Σ_m e^{a_im} Σ_j e^{b_jm} v_j, divided by the same sum with 1 in place of v_j. Common factors
cancel, so the sum of feature m is stored as e^{top_m} · sums_m with top_m = max_j b_jm, and query i is scaled by its
largest a_im + top_m. Then every exponential is at most 1 and the denominator at least 1, whatever the logits. The
causal form uses the maxima of the past only, so no token depends on its future, not even through rounding.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.ops.shared.causal_sums import any_length, first_tokens, hide, in_chunks
from polymix.ops.shared.tensors import accumulator, without_autocast

BLOCK = 16  # tokens in a block, whose pairs are computed directly, at the cost of N · BLOCK · m exponentials
MAX_EXPORTED_BLOCKS = 1 << 16  # blocks of a sequence whose length an exported graph leaves free
LOG_ZERO = -1e30  # the logarithm of a zero weight; finite, so that the difference of two is not NaN


class PerformerState(NamedTuple):
    """The state of a recurrent Performer: e^top · sums = Σ_j e^{b_jm} [v_j, 1] for each feature m."""

    top: Tensor  # (B, heads, m), in float32 or wider
    sums: Tensor  # (B, heads, m, d + 1)

    @staticmethod
    def blank() -> tuple[float, float]:
        """The entries of the state of no tokens."""
        return LOG_ZERO, 0.0

    def merge(self, later: PerformerState, carry: Tensor | None = None) -> PerformerState:
        """The state after both parts of a sequence; nothing is forgotten, so that `carry` is None."""
        return _join(self, later)


def orthogonal_features(count: int, d: int, generator: torch.Generator) -> Tensor:
    """Draw ω (count, d), in float64 on the CPU: normal rows that are orthogonal within each block of d rows."""
    blocks = []
    kw: dict[str, Any] = {"generator": generator, "dtype": torch.float64, "device": "cpu"}
    for _ in range(-(-count // d)):
        normal, length = torch.randn(d, d, **kw), torch.randn(d, d, **kw).norm(dim=1, keepdim=True)
        basis, upper = torch.linalg.qr(normal)
        # LAPACK's choice of signs is not random. Without this, the mean over ω would not be the exponential.
        blocks.append((basis * upper.diagonal().sign()).t() * length)
    return torch.cat(blocks)[:count]


def relu_features(x: Tensor, omega: Tensor) -> Tensor:
    """relu(ω·x d^-¼) + 0.001: (…, d) -> (…, m) in float32 or wider; positive, so that denominators are not zero."""
    dtype = accumulator(x.dtype)
    with without_autocast(x.device):
        return F.relu((x.to(dtype) * x.shape[-1] ** -0.25) @ omega.to(dtype).t()) + 1e-3


def _logarithms(x: Tensor, omega: Tensor) -> Tensor:
    """ω·x' - |x'|²/2: (…, d) -> (…, m) in float32 or wider."""
    dtype = accumulator(x.dtype)
    x = x.to(dtype) * x.shape[-1] ** -0.25
    return x @ omega.to(dtype).t() - x.square().sum(-1, keepdim=True) / 2


def _keys(k: Tensor, v: Tensor, omega: Tensor, mask: Tensor | None) -> tuple[Tensor, Tensor]:
    """b (B, h, N, m) and [v, 1]; padding gets zero weight and zero values."""
    b = _logarithms(hide(k, mask), omega)
    if mask is not None:
        b = b.masked_fill(~mask[:, None, :, None], LOG_ZERO)
    return b, hide(F.pad(v.to(b.dtype), (0, 1), value=1.0), mask)


def _divide(sums: Tensor) -> Tensor:
    """Divide sums of [v, 1] by their last entry, which is at least 1, or 0 if no key was seen."""
    return sums[..., :-1] / sums[..., -1:].clamp_min(0.5)


def performer(q: Tensor, k: Tensor, v: Tensor, omega: Tensor, *, mask: Tensor | None = None) -> Tensor:
    """Compute FAVOR+ attention over all keys.

    Args:
        q: (B, h, M, d).
        k: (B, h, N, d).
        v: (B, h, N, d).
        omega: ω, (m, d).
        mask: (B, N), True for real keys.
    Returns:
        (B, h, M, d) in the dtype of v, computed in float32 or wider. Cost: (M + N) m (2 d + 1) multiply-adds per
        head.
    """
    return performer_read(q, performer_pool(k, v, omega, mask=mask), omega).to(v.dtype)


def performer_pool(k: Tensor, v: Tensor, omega: Tensor, *, mask: Tensor | None = None) -> PerformerState:
    """What `performer` needs of its keys and values; arguments as there."""
    with without_autocast(k.device):
        b, values = _keys(k, v, omega, mask)
        top = b.detach().amax(2)  # (B, h, m)
        return PerformerState(top, (b - top.unsqueeze(2)).exp().transpose(-1, -2) @ values)


def performer_read(q: Tensor, state: PerformerState, omega: Tensor) -> Tensor:
    """What `performer` gives to queries that see all tokens of `state`, in the dtype of the state."""
    with without_autocast(q.device):
        a = _logarithms(q, omega) + state.top.unsqueeze(2)
        weighted = (a - a.detach().amax(-1, keepdim=True)).exp() @ state.sums
        return _divide(weighted)


def performer_causal(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    omega: Tensor,
    *,
    mask: Tensor | None = None,
    state: PerformerState | None = None,
) -> tuple[Tensor, PerformerState]:
    """The causal form of `performer`, and the state after the last token.

    The arguments are the same, and `state` is the state before the first token. Cost: that of `performer`, and
    N · BLOCK exponentials per feature for the pairs within blocks of 16 tokens.
    """
    n = q.shape[2]
    size = 1 if n == 1 else BLOCK
    with without_autocast(q.device):
        b, values = _keys(k, v, omega, mask)
        b, values, a = in_chunks(b, size, LOG_ZERO), in_chunks(values, size), in_chunks(_logarithms(q, omega), size)
        if state is None:
            shape = (*b.shape[:2], b.shape[-1])
            state = PerformerState(b.new_full(shape, LOG_ZERO), b.new_zeros(*shape, values.shape[-1]))
        top = b.detach().amax(3)  # (B, h, blocks, m)
        sums = (b - top.unsqueeze(3)).exp().transpose(-1, -2) @ values
        before, end = _running(top, sums, state)
        reach = torch.maximum(before.top.unsqueeze(3), _running_maximum(b.detach()))  # largest b that each token sees
        height = (a.detach() + reach).amax(-1, keepdim=True)  # (B, h, blocks, size, 1)
        past = (a + before.top.unsqueeze(3) - height).exp() @ before.sums
        pairs = (a - height).unsqueeze(4) + b.unsqueeze(3)  # (B, h, blocks, i, j, m)
        future = torch.ones(size, size, dtype=torch.bool, device=q.device).triu(1)
        inside = pairs.masked_fill(future.unsqueeze(-1), LOG_ZERO).exp().sum(-1) @ values
        return first_tokens(_divide((past + inside).flatten(2, 3)), n).to(v.dtype), end


def _running_maximum(b: Tensor) -> Tensor:
    """The largest b (B, h, blocks, BLOCK, m) of each token of a block and those before it; ONNX has no `cummax`."""
    for shift in _doublings(b.shape[3]):
        b = torch.maximum(b, F.pad(b[:, :, :, :-shift], (0, 0, shift, 0), value=LOG_ZERO))
    return b


def _doublings(count: int) -> list[int]:
    """1, 2, 4, … below count, which is taken for MAX_EXPORTED_BLOCKS where an exported graph leaves it free."""
    return [1 << place for place in range(((MAX_EXPORTED_BLOCKS if any_length(count) else count) - 1).bit_length())]


def _join(a: PerformerState, b: PerformerState) -> PerformerState:
    """Add two states, with the larger of the two tops."""
    top = torch.maximum(a.top, b.top)
    sums = (part.sums * (part.top - top).exp().unsqueeze(-1) for part in (a, b))
    return PerformerState(top, next(sums) + next(sums))


def _running(top: Tensor, sums: Tensor, start: PerformerState) -> tuple[PerformerState, PerformerState]:
    """The state before each of T block sums, and the state after the last.

    The sums are accumulated in groups of BLOCK: all groups in parallel, one sum after another; then the same for the
    sums of the groups. Each state is made of its own past only, so not even a NaN of the future reaches it.

    Args:
        top: (B, h, T, m).
        sums: (B, h, T, m, e).
        start: the state before the first sum.
    Returns:
        The states before each sum, stacked along T, and the final state. Cost: O(T).
    """
    count = top.shape[2]
    if any_length(count):  # the number of levels below would depend on it, and a graph has one number of nodes
        return _running_by_doubling(top, sums, start)
    if count == 1:
        end = _join(start, PerformerState(top[:, :, 0], sums[:, :, 0]))
        return PerformerState(start.top.unsqueeze(2), start.sums.unsqueeze(2)), end
    tops = in_chunks(top, BLOCK, LOG_ZERO)  # (B, h, groups, BLOCK, m)
    parts = in_chunks(sums.flatten(-2), BLOCK).unflatten(-1, sums.shape[-2:])
    inner = [PerformerState(torch.full_like(tops[:, :, :, 0], LOG_ZERO), torch.zeros_like(parts[:, :, :, 0]))]
    for t in range(BLOCK):
        inner.append(_join(inner[-1], PerformerState(tops[:, :, :, t], parts[:, :, :, t])))
    earlier, end = _running(*inner.pop(), start)
    before = _join(
        PerformerState(earlier.top.unsqueeze(3), earlier.sums.unsqueeze(3)),
        PerformerState(torch.stack([part.top for part in inner], 3), torch.stack([part.sums for part in inner], 3)),
    )
    return PerformerState(before.top.flatten(2, 3)[:, :, :count], before.sums.flatten(2, 3)[:, :, :count]), end


def _running_by_doubling(top: Tensor, sums: Tensor, start: PerformerState) -> tuple[PerformerState, PerformerState]:
    """As `_running`, for any T up to MAX_EXPORTED_BLOCKS in one graph. Cost: O(T) for each doubling."""
    count = top.shape[2]
    each = PerformerState(top, sums)
    for shift in _doublings(count):
        earlier = PerformerState(
            F.pad(each.top, (0, 0, shift, 0), value=LOG_ZERO)[:, :, :count],
            F.pad(each.sums, (0, 0, 0, 0, shift, 0))[:, :, :count],
        )
        each = _join(each, earlier)
    each = _join(each, PerformerState(start.top.unsqueeze(2), start.sums.unsqueeze(2)))
    tops = torch.cat([start.top.unsqueeze(2), each.top], 2)
    totals = torch.cat([start.sums.unsqueeze(2), each.sums], 2)
    return PerformerState(tops[:, :, :-1], totals[:, :, :-1]), PerformerState(tops[:, :, -1], totals[:, :, -1])
