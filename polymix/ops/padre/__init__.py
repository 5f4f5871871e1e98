"""PADRe: `padre` runs the polynomial with any implementation (PADRe, Eq. 1-6 and 15-20)."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from polymix.ops.dispatch import choose, without_gradients
from polymix.ops.operator import Operator
from polymix.ops.padre import blocked, eager, inplace, native
from polymix.ops.padre.eager import BASES, SPREAD, Convolution, PadreMaps, PadreTerms, size
from polymix.ops.padre.inplace import merged_first
from polymix.ops.shared.signature import Signature

padre_step = Operator(
    "padre_step",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? y, SymInt[] grid, bool causal, int dilation) -> Tensor",
    eager.step, (0, 1, 2, 3),
    Signature("x: B, N, D; weight: ...; bias: D; y=: B, prod(grid), D", "=: B, prod(grid), D",
              "tuple(weight.shape[:2]) == (D, 1) and weight.ndim == 2 + len(grid) and weight.numel() > 0",
              "impl != 'native' or (dilation == 1 and len(grid) in (1, 2))",
              "N == prod(grid) + causal * dilation * (weight.shape[2] - 1)"),
    triton="polymix.ops.padre.triton:step", native="polymix.ops.padre.native:step",
)  # fmt: skip
_IN_BLOCKS = ("blocked",)  # the native implementation is worth it for few tokens too


def padre(x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], *, impl: str = "auto") -> Tensor:
    """Compute PADRe's polynomial of the tokens (PADRe, Eq. 1-6; with a denominator, Eq. 15-20).

        P = Σ_i W_i ⊙ Z_i + L,  Y_i = A_i X B_i,  Z_1 = Y_1,  Z_{i+1} = (C_i Z_i D_i) ⊙ Y_{i+1}

    The rational form divides P by R² + ε.

    Args:
        x: (B, N, D), with N = ∏ grid if a map is a convolution.
        maps: A_i, B_i, C_i and D_i.
        terms: which Z_i are summed, and how.
        grid: the sizes of the grid's axes.
        impl: "auto", "eager", "blocked", "native" or "triton". The kernels support dense channel maps, depthwise
            convolutions over the tokens, one head and the monomial basis.
    Returns:
        (B, N, D) in the dtype of x. Cost: that of the maps; linear in N for dense channel maps and convolutions.
    Raises:
        CapabilityError: the implementation requested by name does not support the call.
    """
    why = maps.unsupported
    if terms.heads > 1 or terms.normalize or terms.S is not None or terms.basis != "monomial":
        why = "supports one head and the monomial basis only (no normalize, denominator or pattern)"
    tensors, plain = [x, *(maps.shared or ()), terms.weight, terms.constant], len(grid) < 3
    for token in (*maps.A, *maps.C):
        if isinstance(token, Convolution):
            tensors += (token.weight, token.bias, *(token.prefix or ()))
            plain = plain and token.dilation == 1
    for channel in maps.D:
        tensors += channel if isinstance(channel, tuple) else ()
    axes = None if plain else "supports grids of one or two axes without dilation only"
    impl = choose("padre", impl, tensors, {"blocked": why, "triton": why, "native": why or axes}, in_blocks=_IN_BLOCKS)
    if impl == "eager":
        return eager.polynomial(x, maps, terms, grid)
    if not without_gradients(impl):
        return eager.polynomial(x, maps, terms, grid, partial(padre_step, impl=impl))
    return inplace.polynomial(x, maps, terms, grid, native.apply if impl == "native" else blocked.apply)


__all__ = ["BASES", "SPREAD", "Convolution", "PadreMaps", "PadreTerms", "merged_first", "padre", "padre_step", "size"]
