"""QT, attention with a quadratic Taylor expansion of the exponential (QT-ViT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix import ops
from polymix.errors import check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.mixer import Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.dispatch import IMPLS
from polymix.ops.qt import QtOptions, QtState, QtWeights, feature_size
from polymix.ops.shared.tensors import accumulator
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense, affine


class QtMixer(TokenMixer):
    """Attention in linear time, with exp(s) of the logit s = q·k/√d truncated to 1 + s + s²/2 (QT-ViT).

        Y = φ(Q)(φ(K)ᵀ V) / (φ(Q) Σ_j φ(k_j))     per head; W_o joins the heads
        full     ⟨φ(q), φ(k)⟩ = 1 + s + s²/2                                    F = 1 + d + d(d+1)/2 features
        compact  φ(x) = [α x_i², β (4/d)^¼ x_i, γ], with learned α, β, γ per head   F = 2d + 1

    The paper writes K_r and K̃_r for φ. `order` truncates the expansion after s⁰, s¹ or s². The full form of order 2
    is at least ½. The compact similarity is a sum of squares while β² ≤ |αγ|. Otherwise, and at order 1, it can be
    negative, so the denominator is kept above 0.001 times the number of visible tokens. The causal form works in
    chunks of 128 tokens; torch.export then needs a fixed length.

    Raises: OptionError for a number of heads that does not divide D.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: F (d + 1) numbers per head.
    Source: QT-ViT, the quadratic Taylor expansion (full) and its reduced kernel (compact).
    """

    name = "qt"
    capabilities = Capabilities(causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True)
    impls = IMPLS
    config: QtConfig

    def __init__(self, config: QtConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        compact = config.form == "compact"
        self.scale = nn.Parameter(torch.ones(3, self.heads, 1, 1, **kw)) if compact else None  # α, β, γ

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        kw: dict[str, Any] = {"mask": call.mask, "causal": bool(call.causal), "values": call.values}
        return ops.qt(x, context, self._weights, self._options, impl=self.config.impl, **kw)

    def scan(self, x: Tensor, state: QtState | None, mask: Tensor | None) -> tuple[Tensor, QtState]:
        return ops.qt_chunk(x, state, self._weights, self._options, mask=mask, impl=self.config.impl)

    @property
    def _weights(self) -> QtWeights:
        return QtWeights(affine(self.qkv.qkv), affine(self.proj), self.scale)

    @property
    def _options(self) -> QtOptions:
        return QtOptions(self.heads, self.config.form, self.config.order)

    def check_state(self, state: Any, x: Tensor) -> str | None:
        d = self.dim // self.heads
        shape = (x.shape[0], self.heads, feature_size(d, self.config.form, self.config.order), d + 1)
        if isinstance(state, QtState) and tuple(state.moments.shape) == shape and state.count.shape == x.shape[:1]:
            return None
        return f"a QtState with moments {shape} in {accumulator(x.dtype)}"

    @property
    def polynomial(self) -> Polynomial:
        order = self.config.order
        if order == 0:  # the mean of the values
            return Polynomial(1, homogeneous=not self.config.bias)
        degree = 2 * order * self.heads  # of the common denominator: W_o adds one quotient for each head
        return Polynomial(rational=(degree + 1, degree))

    def no_weight_decay(self) -> set[str]:
        return set() if self.scale is None else {"scale"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        matrices = self.qkv.named_matrices(self.proj)
        scale = (None, None, None) if self.scale is None else self.scale[:, :, 0, 0].unbind()
        return {**matrices, **dict(zip(("alpha", "beta", "gamma"), scale, strict=True))}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.dim // self.heads
        if self.config.form == "compact":  # one product for each power of k and of q; the rest are sums
            powers = self.heads * self.config.order
            products = [Op("matmul", (powers, d, n, d)), Op("matmul", (powers, n, d, d + 1))]
            return [self.qkv.op(n), *(products if powers else ()), linear_op(n, self.proj)]
        features = feature_size(d, self.config.form, self.config.order)
        pool = Op("matmul", (self.heads, features, n, d + 1))
        query = Op("matmul", (self.heads, n, features, d + 1))
        return [self.qkv.op(n), pool, query, linear_op(n, self.proj)]


@register(QtMixer)
@dataclass(frozen=True, kw_only=True)
class QtConfig(HeadsConfig):
    """Options of QT.

    Args:
        form: "compact" (learned scales, O(N d²)) or "full" (the exact expansion, O(N d³)).
        order: highest power of s: 2, 1 or 0.
    """

    name: ClassVar[str] = "qt"
    output: ClassVar[str] = "attention with exp cut to 1 + s + s²/2"
    cost_formula: ClassVar[str] = (
        "4 N D² + order N D (2 d + 1); 4 N D² + 2 N F (D + heads) if form = full; where F = binomial(d + order, order)"
    )
    sees: ClassVar[str] = "everything, the past, a context"
    form: str = "compact"
    order: int = 2

    def check(self) -> None:
        check_choice("form", self.form, ("compact", "full"))
        check_choice("order", self.order, (0, 1, 2))
