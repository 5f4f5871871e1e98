"""QT, attention with a quadratic Taylor expansion of the exponential (QT-ViT)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix import ops
from polymix.errors import check_choice
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig, PrefixedGridConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.heads_mixer import HeadsMixer
from polymix.mixers.inheritance import AttentionMaps, Projection, Sources, add_sources, copy_map
from polymix.mixers.mixer import Polynomial
from polymix.mixers.multi_scale import MultiScale, called_grid, check_scales, scale_grid, smoothing_ops
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.states import Counts, StateSpec
from polymix.ops.dispatch import IMPLS
from polymix.ops.qt import QtOptions, QtState, QtWeights, feature_size
from polymix.ops.shared.tensors import project
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense, affine


class QtMixer(HeadsMixer):
    """Attention in linear time, with exp(s) of the logit s = q·k/√d truncated to 1 + s + s²/2 (QT-ViT).

        Y = φ(Q)(φ(K)ᵀ V) / (φ(Q) Σ_j φ(k_j))     per head; W_o joins the heads
        full     ⟨φ(q), φ(k)⟩ = 1 + s + s²/2                                    F = 1 + d + d(d+1)/2 features
        compact  φ(x) = [α x_i², β (4/d)^¼ x_i, γ], with learned α, β, γ per head   F = 2d + 1

    The paper writes K_r and K̃_r for φ. `order` truncates the expansion after s⁰, s¹ or s². The full form of order 2
    is at least ½. The compact similarity is a sum of squares while β² ≤ |αγ|. Otherwise, and at order 1, it can be
    negative, so the denominator is kept above 0.001 times the number of visible tokens. The causal form works in
    chunks of 128 tokens; torch.export then needs a fixed length.

    With `scales`, smoothed copies of Q, K and V have further heads, as in EfficientViT (see `MultiScale`); W_o joins
    all of them. The similarity is the same. Scales need a grid, in the options or the call, and rule out causal order
    and a separate context. Padding is hidden from the convolutions, too.

    Raises: OptionError for a number of heads that does not divide D. ShapeError for scales without a grid.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: F (d + 1) numbers per head.
    Source: QT-ViT, the quadratic Taylor expansion (full) and its reduced kernel (compact); scales: EfficientViT (Cai et
    al. 2023), the host in which QT-ViT replaces the relu kernel.
    """

    name = "qt"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, grids=(2,),
        sequence="sum",
    )  # fmt: skip
    impls = IMPLS
    config: QtConfig

    def __init__(self, config: QtConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        scales = config.scales or ()
        self.multi_scale = MultiScale(dim, self.heads, scales, config.bias, **kw) if scales else None
        self.proj = Dense(dim * (1 + len(scales)), dim, config.bias, **kw)
        compact, heads = config.form == "compact", self.heads * (1 + len(scales))
        self.scale = nn.Parameter(torch.ones(3, heads, 1, 1, **kw)) if compact else None  # α, β, γ
        if scales:
            self.capabilities = Capabilities(values=True, masks=frozenset({"padding"}), grids=(2,))
        else:
            self.capabilities = replace(type(self).capabilities, grids=())

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        if self.multi_scale is not None:
            return self._mix_scales(x, call, self.multi_scale)
        kw: dict[str, Any] = {"mask": call.mask, "causal": bool(call.causal), "values": call.values}
        return ops.qt(x, context, self._weights, self._options, impl=self.config.impl, **kw)

    def _mix_scales(self, x: Tensor, call: MixerCall, multi_scale: MultiScale) -> Tensor:
        grid, maps = called_grid(call.grid), self.qkv.qkv
        qkv = maps(x) if call.values is None else torch.cat(project(affine(maps), x, x, call.values), dim=-1)
        if call.mask is not None:
            qkv = qkv.masked_fill(~call.mask.unsqueeze(-1), 0.0)
        q, k, v = multi_scale(qkv, grid, self.config.num_prefix_tokens)
        kw: dict[str, Any] = {"form": self.config.form, "order": self.config.order, "impl": self.config.impl}
        y = ops.qt_attention(q, k, v, scale=self.scale, mask=call.mask, **kw)
        return self.proj(y.transpose(1, 2).flatten(2))

    def scan(self, x: Tensor, state: QtState | None, mask: Tensor | None) -> tuple[Tensor, QtState]:
        return ops.qt_chunk(x, state, self._weights, self._options, mask=mask, impl=self.config.impl)

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None = None, causal: bool = False,
        cross: bool = False, state: QtState | None = None,
    ) -> tuple[Tensor, QtState | None]:  # fmt: skip
        config = self.config
        options: dict[str, Any] = {"form": config.form, "order": config.order, "scale": self.scale, "mask": mask}
        if causal:
            return ops.qt_continue(q, k, v, state, impl=config.impl, **options)
        return ops.qt_attention(q, k, v, impl=config.impl, **options), None

    def pool(self, k: Tensor, v: Tensor, mask: Tensor | None) -> QtState:
        config = self.config
        return ops.qt_summary(k, v, form=config.form, order=config.order, scale=self.scale, mask=mask, impl=config.impl)

    def ask(self, q: Tensor, state: QtState) -> Tensor:
        config = self.config
        return ops.qt_read(q, state, form=config.form, order=config.order, scale=self.scale, impl=config.impl)

    @property
    def _weights(self) -> QtWeights:
        return QtWeights(affine(self.qkv.qkv), affine(self.proj), self.scale)

    @property
    def _options(self) -> QtOptions:
        return QtOptions(self.heads, self.config.form, self.config.order)

    def state_spec(self, batch: int) -> StateSpec:
        d = self.dim // self.heads
        shape = (batch, self.heads, feature_size(d, self.config.form, self.config.order), d + 1)
        return StateSpec(QtState, shape, Counts((batch,)))

    @property
    def polynomial(self) -> Polynomial:
        order = self.config.order
        if order == 0:  # the mean of the values
            return Polynomial(1, homogeneous=not self.config.bias)
        heads = self.heads * (1 + len(self.config.scales or ()))
        degree = 2 * order * heads  # of the common denominator: W_o adds one quotient for each head
        return Polynomial(rational=(degree + 1, degree))

    def no_weight_decay(self) -> set[str]:
        return set() if self.scale is None else {"scale"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        matrices = self.qkv.named_matrices(self.proj)
        scale = (None, None, None) if self.scale is None else self.scale[:, :, 0, 0].unbind()
        matrices.update(zip(("alpha", "beta", "gamma"), scale, strict=True))
        if self.multi_scale is None:
            return matrices
        grid = scale_grid(self, n, grid)
        return {**matrices, **self.multi_scale.named_matrices(grid, self.config.num_prefix_tokens)}

    @torch.no_grad()
    def inherit(self, attention: AttentionMaps) -> Sources:
        """As every mixer with heads; and the branches of a host that has the same scales."""
        sources = super().inherit(attention)
        theirs, out = attention.smoothing, attention.out
        if self.multi_scale is None or out is None or tuple(part.size for part in theirs) != self.multi_scale.scales:
            return sources
        add_sources(sources, "multi_scale", self.multi_scale.inherit(theirs))
        parts = [out, *(part.out for part in theirs)]
        joined = Projection(torch.cat([part.weight for part in parts], 1), out.bias, sum((p.keys for p in parts), ()))
        add_sources(sources, "proj", copy_map(joined, self.proj.weight, self.proj.bias))
        return sources

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d, scales = self.dim // self.heads, self.config.scales or ()
        heads, smoothing = self.heads * (1 + len(scales)), []
        if scales:
            place = scale_grid(self, n, grid)
            smoothing = smoothing_ops(n, self.dim, self.heads, scales, place, self.config.num_prefix_tokens)
        if self.config.form == "compact":  # one product for each power of k and of q; the rest are sums
            powers = heads * self.config.order
            products = [Op("matmul", (powers, d, n, d)), Op("matmul", (powers, n, d, d + 1))] if powers else []
        else:
            features = feature_size(d, self.config.form, self.config.order)
            products = [Op("matmul", (heads, features, n, d + 1)), Op("matmul", (heads, n, features, d + 1))]
        return [self.qkv.op(n), *smoothing, *products, linear_op(n, self.proj)]


@register(QtMixer)
@dataclass(frozen=True, kw_only=True)
class QtConfig(HeadsConfig, PrefixedGridConfig):
    """Options of QT.

    Args:
        form: "compact" (learned scales, O(N d²)) or "full" (the exact expansion, O(N d³)).
        order: highest power of s: 2, 1 or 0.
        scales: sizes of the smoothing convolutions, odd, such as (5,). (): none. None: those of the host, if any.
        grid: (H, W) for the scales; can also be passed in the call.
    """

    name: ClassVar[str] = "qt"
    output: ClassVar[str] = "attention with exp cut to 1 + s + s²/2"
    cost_formula: ClassVar[str] = (
        "4 N D² + N T; plus N D² + N T + 3 N D (s² + d) for each s in scales; where F = binomial(d + order, order); "
        "where T = 2 F (D + heads) if form = full; where T = order D (2 d + 1)"
    )
    sees: ClassVar[str] = "everything, the past, a context"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}
    form: str = "compact"
    order: int = 2
    scales: tuple[int, ...] | None = None

    @property
    def attends(self) -> bool:
        return not self.scales

    def check(self) -> None:
        check_choice("form", self.form, ("compact", "full"))
        check_choice("order", self.order, (0, 1, 2))
        check_scales(() if self.scales is None else self.scales, self.grid, self.num_prefix_tokens)
        check_choice("impl", self.impl, ("auto", "eager", "triton") if self.scales else IMPLS)

    @property
    def placed(self) -> bool:
        """Whether positions matter."""
        return bool(self.scales)

    def for_scales(self, scales: tuple[int, ...]) -> QtConfig:
        return self.changed(scales=scales) if self.scales is None else self
