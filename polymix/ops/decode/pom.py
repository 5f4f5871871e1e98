"""A step of PoM: one more token of each sequence."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from polymix.ops.native.arrays import KINDS
from polymix.ops.native.library import call
from polymix.ops.shared.tensors import Linear


class _Step(ctypes.Structure):
    """The struct Step of decode_pom.c."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("rows", "degree", "act", "gate", "mean", "bf16", "threads"))


def call_pom_step(
    x: Tensor, total: Tensor, count: Tensor, poly: Linear, gate: Linear, proj: Linear, alpha: Tensor, *,
    activation: str, gating: str, mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """h = act(W_h x + b_h),  S' = S + Σ_p α_p ⊙ h^p,  y = W_o [σ(W_s x + b_s) ⊙ S' / count'] + b_o.

    x and all weights have one dtype and are contiguous. Intermediate results are float32, except for the input of the
    last map, which is rounded to the dtype of x.

    Args:
        x: the token (B, 1, D), for at most MAX_ROWS sequences.
        total: S (B, E), float32.
        count: the number of tokens before this one, (B,) int64.
        poly, gate, proj: W_h, W_s, W_o and their biases or None.
        alpha: α (E, k).
        activation, gating: act and σ, names in `arrays.KINDS`.
        mean: whether S' is divided by the count.
    Returns:
        y (B, 1, D), S' and count'. Cost: 3 D E multiply-adds for each sequence.
    """
    x, count = x.contiguous(), count + 1
    after, (width, degree) = torch.empty_like(total), alpha.shape
    gated, y = x.new_empty(x.shape[0], width), torch.empty_like(x)
    sizes = _Step(x.shape[0], degree, KINDS.index(activation), KINDS.index(gating), mean, x.dtype == torch.bfloat16,
                  torch.get_num_threads())  # fmt: skip
    call("decode_pom", x, poly, gate, proj, alpha, total.contiguous(), count, after, gated, y, sizes)
    return y, after, count
