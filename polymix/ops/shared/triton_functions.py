"""What Triton kernels share: activations and polynomials, each with its derivative, and how a card multiplies."""
# mypy: allow-untyped-defs, allow-incomplete-defs

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _normal(x):
    """Φ(x), the share of a normal distribution below x, within 2e-7.

    log₂ Φ(-|x|) is nearly a parabola: a polynomial of degree 8, fitted so that Φ and xΦ(x) are off by at most 6e-8
    before rounding, takes half of the instructions of erf, which PoM's kernels would wait for more than for memory.
    """
    y = tl.abs(x)
    power = 3.296801261247812e-05 + y * -2.2758725519434094e-06
    power = -0.00020247924604789580 + y * (-0.00015727870955829033 + y * power)
    power = -0.05254643662990539 + y * (0.007142782401226951 + y * power)
    power = -0.9999999590153018 + y * (-1.1511069412567236 + y * (-0.4591930569928644 + y * power))
    tail = tl.exp2(power)
    return tl.where(x < 0.0, tail, 1.0 - tail)


@triton.jit
def activation(x, KIND: tl.constexpr):
    """act(x) and act'(x), elementwise in the dtype of x. An unused result costs nothing once compiled.

    A NaN stays a NaN, and the derivatives at kinks are those of PyTorch.
    """
    if KIND == "gelu":
        below = _normal(x)
        value = x * below
        slope = below + x * 0.3989422804014327 * tl.exp(-0.5 * x * x)
    elif KIND == "relu":
        value = tl.where(x <= 0.0, 0.0, x)
        slope = tl.where(x <= 0.0, 0.0, 1.0)
    elif KIND == "clamped_leaky_relu":
        leaky = tl.where(x > 0.0, x, 0.01 * x)
        value = tl.where(leaky < -0.1, -0.1, tl.where(leaky > 6.0, 6.0, leaky))
        slope = tl.where((leaky < -0.1) | (leaky > 6.0), 0.0, tl.where(x > 0.0, 1.0, 0.01))
    else:
        tl.static_assert(KIND == "identity", "activation is gelu, relu, clamped_leaky_relu or identity")
        value = x
        slope = tl.full(x.shape, 1.0, x.dtype)
    return value, slope


@triton.jit
def polynomial(x, alpha, stride, inside, DEGREE: tl.constexpr):
    """Σ_{p=1..DEGREE} α_p x^p and its derivative in x, by one Horner loop.

    `alpha` points to α_1 and broadcasts against x; α_{p+1} lies `stride` elements after α_p. Only coefficients
    `inside` are read.
    """
    value = tl.zeros_like(x)
    slope = tl.zeros_like(x)
    for i in tl.static_range(DEGREE):
        coefficient = tl.load(alpha + (DEGREE - 1 - i) * stride, mask=inside, other=0.0).to(x.dtype)
        inner = coefficient + value  # value so far = Σ_{q>p} α_q x^(q-p)
        slope = inner + x * slope
        value = x * inner
    return value, slope


def precision(x: Tensor) -> str:
    """The precision of tl.dot: with 16 bits, tf32, whose 11 bits hold an entry whole, and a square to 5e-4.

    AMD's matrix cores multiply float32 as it is; Triton has no tf32x3 for them, and tf32 for one generation only.
    """
    if torch.version.hip is not None:
        return "ieee"
    return "tf32x3" if x.dtype == torch.float32 else "tf32"
