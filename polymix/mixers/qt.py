"""QT, quadratic-Taylor attention (QT-ViT)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.errors import check_choice
from polymix.mixers.base import Capabilities, MixerConfig, Polynomial, TokenMixer
from polymix.mixers.checks import Call
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.registry import register
from polymix.ops.blocked.qt import qt
from polymix.ops.common import accumulator
from polymix.ops.dispatch import IMPLS
from polymix.ops.pooled_linear import wide
from polymix.ops.qt import GUARD, QtState, feature_size, qt_attention, qt_causal
from polymix.ops.qt_linear import coefficients, qt_pool, qt_spread
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense


class QtMixer(TokenMixer):
    """Attention whose exp(s), s = q·k/√d, is cut to 1 + s + s²/2, so that it takes linear time.

        Y = φ(Q)(φ(K)ᵀV) / (φ(Q) Σ_j φ(k_j)) a head, heads joined by W_o
        full     ⟨φ(q), φ(k)⟩ = 1 + s + s²/2                              F = 1 + d + d(d+1)/2 features
        compact  φ(x) = [α x_i², β (4/d)^¼ x_i, γ], α, β, γ learned a head   F = 2d + 1

    `order` cuts the expansion after s⁰, s¹ or s². Full order 2 is at least ½ everywhere. The compact similarity
    cannot fall below zero while β² ≤ |αγ| (it is then a sum of squares); beyond that, and at order 1, it can, so the
    denominator is never let below 0.001 × the number of tokens seen.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads. Cost: 4 N D² + 2 N F (d + 1) heads multiply-adds, and as 4 N D² +
    order · N d (2 d + 1) heads in the compact form, whose sums are no products. State: F (d + 1) numbers a head.
    Bidirectional, causal (in chunks of 128; torch.export then needs a fixed length), recurrent, padding masks, cross.
    Source: QT-001 … QT-017 (QT-ViT; the paper writes K_r and K̃_r for φ).
    """

    name = "qt"
    capabilities = Capabilities(causal=True, cross=True, masks=frozenset({"padding"}), recurrent=True)
    impls = IMPLS
    config: QtConfig

    def __init__(self, config: QtConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.proj = Dense(dim, dim, config.bias, **kw)
        compact = config.form == "compact"
        self.scale = nn.Parameter(torch.ones(3, self.heads, 1, 1, **kw)) if compact else None  # α, β, γ

    @property
    def _form(self) -> dict[str, Any]:
        return {"form": self.config.form, "order": self.config.order, "scale": self.scale}

    @property
    def _wide(self) -> str | None:
        return None if self.dim // self.heads <= 128 else "its kernels take heads of up to 128 channels"

    def mix(self, x: Tensor, context: Tensor, call: Call) -> Tensor:
        if call.causal:
            return self.scan(x, None, call.mask)[0]
        native = wide(x) if self.config.form == "compact" else 'it is for form="compact"'
        impl = self.choose(x, context, blocked=None, native=native, triton=self._wide)
        if impl == "native":
            return self._at_once(x, context, call.mask)
        if impl == "blocked":
            qkv, proj = self.qkv.qkv, self.proj
            return qt(
                x, context, (qkv.weight, qkv.bias), (proj.weight, proj.bias), self.scale,
                heads=self.heads, form=self.config.form, order=self.config.order, mask=call.mask,
            )  # fmt: skip
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, context))
        y = qt_attention(q, k, v, mask=call.mask, impl=impl, **self._form)
        return self._join(y)

    def _at_once(self, x: Tensor, context: Tensor, mask: Tensor | None) -> Tensor:
        """The maps with what they pool, and with what is made of that, in one operator each."""
        assert self.scale is not None
        (ask, tell), order = self.qkv.apart(), self.config.order
        sums = qt_pool(context, *tell, mask, self.heads, order, impl="native")
        if mask is None:
            least = sums.new_full(x.shape[:1], GUARD * context.shape[1])
        else:
            least = GUARD * mask.sum(1).clamp_min(1).to(sums.dtype)
        moments = sums * coefficients(self.scale, self.dim // self.heads, order)
        proj = (self.proj.weight, self.proj.bias)
        return qt_spread(x, *ask, moments, least, *proj, impl="native")

    def _join(self, y: Tensor) -> Tensor:
        return self.proj(y.transpose(1, 2).flatten(-2))

    def scan(self, x: Tensor, state: QtState | None, mask: Tensor | None) -> tuple[Tensor, QtState]:
        whole = "it is for a context that every token sees whole"
        impl = self.choose(x, blocked=whole, native="it keeps no state", triton=self._wide)
        q, k, v = (part.transpose(1, 2) for part in self.qkv(x, x))
        y, state = qt_causal(q, k, v, mask=mask, state=state, impl=impl, **self._form)
        return self._join(y), state

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
        below = 2 * order * self.heads  # W_o adds quotients of as many denominators as there are heads
        return Polynomial(rational=(below + 1, below))

    def no_weight_decay(self) -> set[str]:
        return set() if self.scale is None else {"scale"}

    def letters(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        letters = self.qkv.letters(self.proj)
        scale = (None, None, None) if self.scale is None else self.scale[:, :, 0, 0].unbind()
        return {**letters, **dict(zip(("alpha", "beta", "gamma"), scale, strict=True))}

    def ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.dim // self.heads
        if self.config.form == "compact":  # a product for each power of k, one for each of q; sums are none
            powers = self.heads * self.config.order
            products = [Op("matmul", (powers, d, n, d)), Op("matmul", (powers, n, d, d + 1))]
            return [self.qkv.op(n), *(products if powers else ()), linear_op(n, self.proj)]
        features = feature_size(d, self.config.form, self.config.order)
        pool = Op("matmul", (self.heads, features, n, d + 1))
        ask = Op("matmul", (self.heads, n, features, d + 1))
        return [self.qkv.op(n), pool, ask, linear_op(n, self.proj)]


@register(QtMixer)
@dataclass(frozen=True, kw_only=True)
class QtConfig(MixerConfig):
    """Options of QT.

    heads: None takes one for every 64 channels. form: "compact" (learned, O(N d²)) or "full" (exact, O(N d³)).
    order: 2, or 1 or 0 for a shorter expansion.
    """

    name: ClassVar[str] = "qt"
    heads: int | None = None
    form: str = "compact"
    order: int = 2

    def check(self) -> None:
        check_choice("form", self.form, ("compact", "full"))
        check_choice("order", self.order, (0, 1, 2))
