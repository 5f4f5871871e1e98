"""PADRe: one call, whichever implementation runs."""

from __future__ import annotations

from functools import partial

from torch import Tensor

from polymix.ops.dispatch import Operator, choose, without_gradients
from polymix.ops.padre import blocked, eager, native
from polymix.ops.padre.eager import BASES, SPREAD, Convolution, PadreMaps, PadreTerms, merged_first, size

padre_step = Operator(
    "padre_step",
    "(Tensor x, Tensor weight, Tensor? bias, Tensor? y, SymInt[] grid, bool causal, int dilation) -> Tensor",
    eager.step, (0, 1, 2, 3), triton="polymix.ops.padre.triton:step", native="polymix.ops.padre.native:step",
)  # fmt: skip


_IN_BLOCKS = ("blocked",)  # the native form pays for few tokens too


def padre(x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], *, impl: str = "auto") -> Tensor:
    """P = Σ_i W_i ⊙ Z_i + L with Y_i = A_i X B_i, Z_1 = Y_1, Z_{i+1} = (C_i Z_i D_i) ⊙ Y_{i+1}.

    The rational form divides by R² + ε.

    Args:
        x: (B, N, D), N = ∏ grid where a map is a convolution. maps: A_i, B_i, C_i, D_i. terms: which Z_i are summed,
        and how. impl: "auto", "eager", "blocked", "native" or "triton". Kernels take dense channel maps with depthwise
        convolutions
            over the tokens, one head and plain monomials.
    Returns:
        (B, N, D) in the type of x. Cost: that of the maps, linear in N for dense channel maps and convolutions.
    """
    impl = _choose(x, maps, terms, grid, impl)
    if impl == "eager":
        return eager.polynomial(x, maps, terms, grid)
    if not without_gradients(impl):
        return eager.polynomial(x, maps, terms, grid, partial(padre_step, impl=impl))
    if x.shape[:2].numel() >= 2 * x.shape[2]:  # a product of D³, once, saves one of N D²
        maps = maps.with_first(merged_first(maps, terms))
    p = blocked.padre(x, maps, terms, grid, native.apply if impl == "native" else blocked.apply)
    return p if terms.constant is None else p + terms.constant


def _choose(x: Tensor, maps: PadreMaps, terms: PadreTerms, grid: tuple[int, ...], impl: str) -> str:
    """The implementation for these maps."""
    why = maps.why_general
    if terms.heads > 1 or terms.normalize or terms.S is not None or terms.basis != "monomial":
        why = "it is for one head and plain monomials: no normalize, denominator, other basis or pattern"
    tensors, plain = [x, *(maps.shared or ()), terms.weight, terms.constant], len(grid) < 3
    for token in (*maps.A, *maps.C):
        if isinstance(token, Convolution):
            tensors += (token.weight, token.bias)
            plain = plain and token.dilation == 1
    for channel in maps.D:
        tensors += channel if isinstance(channel, tuple) else ()
    axes = None if plain else "it is for grids of one or two axes, without dilation"
    return choose("padre", impl, tensors, {"blocked": why, "triton": why, "native": why or axes}, in_blocks=_IN_BLOCKS)


__all__ = ["BASES", "SPREAD", "Convolution", "PadreMaps", "PadreTerms", "merged_first", "padre", "padre_step", "size"]
