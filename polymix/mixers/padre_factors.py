"""A PADRe as the kernels want it: channel maps paired with convolutions, and B_1 D_1 as one map."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.ops.blocked import padre as blocked
from polymix.ops.blocked.common import Linear, share
from polymix.ops.dispatch import at_once
from polymix.ops.padre import Convolution, Factor, factored
from polymix.structured import Dense, DepthwiseConv
from polymix.structured.compose import Identity

if TYPE_CHECKING:
    from polymix.mixers.padre import PadreMixer

FIRST = "B_1 D_1"


def against(mixer: PadreMixer, mask: Tensor | None) -> dict[str, str | None]:
    """What speaks against each kernel for this mixer, if anything."""
    why = _against(mixer, mask)
    convs = [part for part in (*mixer.A, *mixer.C) if isinstance(part, DepthwiseConv)]
    plain = mixer.axes < 3 and all(part.dilation == 1 for part in convs)
    return {
        "blocked": why,
        "triton": why,
        "native": why or (None if plain else "it is for grids of one or two axes, without dilation"),
    }


def _against(mixer: PadreMixer, mask: Tensor | None) -> str | None:
    config = mixer.config
    if config.heads > 1 or config.normalize or config.denominator or config.basis != "monomial" or config.pattern:
        return "it is for one head and plain monomials: no normalize, denominator, other basis or pattern"
    if set(mixer.plan.B) != {"dense"} or not {*mixer.plan.D} <= {"dense", "identity"}:
        return "it is for dense channel maps"
    if not all(isinstance(part, (Identity, DepthwiseConv)) for part in (*mixer.A, *mixer.C)):
        return "it is for depthwise token maps, without prefix tokens"
    return None if mask is None else "it takes no mask"


def first_merged(mixer: PadreMixer) -> Linear | None:
    """The shared product of the B_i with B_1 D_1 for B_1, where Z_1 = X B_1 is used for nothing but Z_1 D_1."""
    plain = mixer.config.basis == "monomial" or mixer.config.degree == 2
    alone = plain and mixer.config.degree > 1 and 1 not in mixer.terms and mixer.config.normalize is None
    dense = mixer.plan.B[0] == "dense" and mixer.plan.D[:1] == ("dense",) and mixer.config.heads == 1
    if not (alone and dense and mixer.plan.A[0] == "identity" and mixer.config.pattern is None):
        return None
    shared, last, dim = mixer.B["a"].maps, mixer.D[0], mixer.dim
    weight = torch.cat((last.weight @ shared.weight[:dim], shared.weight[dim:]))
    if shared.bias is None:
        return weight, None
    return weight, torch.cat((F.linear(shared.bias[:dim], last.weight, last.bias), shared.bias[dim:]))


def run(mixer: PadreMixer, x: Tensor, grid: tuple[int, ...], impl: str) -> Tensor:
    """P without L."""
    d = mixer.config.degree
    shared, merged = mixer.B["a"].maps, mixer.merged().get(FIRST)
    if merged is None and at_once(impl) and x.shape[0] * x.shape[1] >= 2 * mixer.dim:
        merged = first_merged(mixer)  # D³ for once, where it saves N D²
    linear = merged or (shared.weight, shared.bias)
    into = [share(linear, i * mixer.dim, (i + 1) * mixer.dim) for i in range(d)]
    first = _factor(into[0], mixer.A[0])
    steps: list[tuple[Factor | None, Factor]] = []
    for i in range(1, d):
        left: Factor | None = _factor(_linear(mixer.D[i - 1]), mixer.C[i - 1])
        if i == 1 and merged is not None:
            first, left = _factor(into[0], mixer.C[0]), None
        steps.append((left, _factor(into[i], mixer.A[i])))
    weights = [_weight(mixer, i) for i in range(1, d + 1)]
    if at_once(impl):
        return blocked.padre(x, first, steps, weights, grid, native=impl == "native")
    return factored(x, first, steps, weights, grid, impl=impl)


def _weight(mixer: PadreMixer, i: int) -> Tensor | float:
    """W_i as `factored` takes it."""
    if i not in mixer.terms:
        return 0.0
    return 1.0 if mixer.W is None else mixer.W[mixer.terms.index(i)]


def _linear(part: nn.Module) -> Linear | None:
    return (part.weight, part.bias) if isinstance(part, Dense) else None


def _factor(channel: Linear | None, token: nn.Module) -> Factor:
    if not isinstance(token, DepthwiseConv):
        return Factor(channel, None)
    return Factor(channel, Convolution(token.weight, token.bias, token.site.causal, token.dilation))
