"""TESA, tensor element self-attention: a non-local block for each way to unfold the feature tensor."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from polymix.errors import ShapeError, check_choice, check_grid_option, check_int
from polymix.mixers.checks import MixerCall, check_grid
from polymix.mixers.config import PrefixedGridConfig
from polymix.mixers.mixer import Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.attention import softmax_attention
from polymix.ops.related.linear_attention import linear_attention
from polymix.ops.shared.tensors import project
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense, affine


class TesaMixer(TokenMixer):
    """Tensor element self-attention: a non-local block for each way to unfold an H × W × r feature tensor (TESA).

        T = X W_t, P = X W_p, G = X W_g     D -> r = D / reduction channels, as tensors H × W × r
        unfoldings   C: r × (H W)    H: H × (W r)    W: W × (H r)     with columns t_i, p_j, g_j of length ℓ = r, H, W
        softmax      column i of Y_m = Σ_j softmax_j(t_i·p_j / √ℓ) g_j
        dot_product  column i of Y_m = (1/columns) Σ_j (t_i·p_j / √ℓ) g_j
        Y = (Y_C + Y_H + Y_W) W_z + b_z

    Mode C is the non-local block, where positions attend to positions. In the other modes a column is one channel at
    one place along one axis, so that single elements attend to each other. The softmax form is quadratic in N;
    dot_product is a polynomial of degree 3, computed as t (pᵀ g).

    The Poly-NL paper measures TESA without printing a formula. With the four maps above and r = D/4 this form has the
    parameters (1.0 M) and multiply-adds (0.94 G) that its Table 1a prints for 14 × 14 × 1024 (it says "channel
    reduction 2"). We chose what that leaves open: the modes share the embeddings, their results are added, and logits
    are divided by √ℓ.

    Prefix tokens (class token, registers) take part in mode C only. Padding reads as zero in a column, and rows and
    columns of the grid without a real token are dropped.

    Shapes: (B, N, D) or (B, D, H, W), returned alike.
    Source: Babiloni et al. (2020); Poly-NL, Sec. 2.2 and Table 1a.
    """

    name = "tesa"
    capabilities = Capabilities(values=True, masks=frozenset({"padding"}), grids=(2,))
    feature_maps = True
    config: TesaConfig

    def __init__(self, config: TesaConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.inner = -(-dim // config.reduction)
        self.embed = Dense(dim, 3 * self.inner, config.bias, **kw)  # W_t, W_p, W_g read the same tokens
        self.proj = Dense(self.inner, dim, config.bias, **kw)  # W_z

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        if call.grid is None:
            cure = "Pass grid=(H, W) in the call or at the build, or a feature map (B, D, H, W)."
            raise ShapeError("grid", None, "a grid of two axes", cure)
        grid, p = call.grid, self.config.num_prefix_tokens
        own = call.values is None
        embedded = self.embed(x) if own else torch.cat(project(affine(self.embed), x, x, call.values), dim=-1)
        embedded = embedded.unflatten(-1, (3, self.inner))
        real = None
        if call.mask is not None:
            embedded = embedded.masked_fill(~call.mask[:, :, None, None], 0.0)
            real = call.mask[:, p:].unflatten(1, grid)
        y = self._attend(*(part.unsqueeze(1) for part in embedded.unbind(2)), scale=self.inner**-0.5, mask=call.mask)
        tensor = embedded[:, p:].unflatten(1, grid)  # (B, H, W, 3, r)
        along = self._unfolded(tensor, real, _HEIGHT) + self._unfolded(tensor, real, _WIDTH)
        return self.proj(y.squeeze(1) + F.pad(along.flatten(1, 2), (0, 0, p, 0)))

    def _unfolded(self, tensor: Tensor, real: Tensor | None, mode: _Mode) -> Tensor:
        """Attention in one unfolding of T, P, G along the grid: (B, H, W, 3, r) -> (B, H, W, r)."""
        columns = tensor.permute(0, 3, mode.other, 4, mode.along)  # (B, 3, ·, r, ℓ)
        t, p, g = columns.flatten(2, 3).unsqueeze(2).unbind(1)  # (B, 1, columns, ℓ)
        scale, mask = t.shape[-1] ** -0.5, None
        if real is not None:  # rows and columns of the grid with only padding are dropped and not counted
            mask = real.any(mode.along).repeat_interleave(self.inner, 1)
            length = real.any(mode.other).sum(1).clamp_min(1).to(t.dtype)
            t, scale = t * length[:, None, None, None] ** -0.5, 1.0
        y = self._attend(t, p, g, scale=scale, mask=mask)
        return y.squeeze(1).unflatten(1, columns.shape[2:4]).permute(0, *mode.back)

    def _attend(self, t: Tensor, p: Tensor, g: Tensor, *, scale: float, mask: Tensor | None) -> Tensor:
        if self.config.form == "softmax":
            return softmax_attention(t, p, g, scale=scale, mask=mask)
        return linear_attention(t * scale, p, g, mask=mask, normalize=False)

    @property
    def polynomial(self) -> Polynomial:
        if self.config.form == "softmax":
            return Polynomial()
        return Polynomial(3, homogeneous=not self.config.bias)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        letters: dict[str, Any] = {"W_z": self.proj.dense(), "b_z": self.proj.bias}
        biases = (None,) * 3 if self.embed.bias is None else self.embed.bias.chunk(3)
        for name, weight, bias in zip("tpg", self.embed.weight.chunk(3), biases, strict=True):
            letters |= {f"W_{name}": weight.t(), f"b_{name}": bias}
        return letters

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        grid = check_grid(self, grid, n - self.config.num_prefix_tokens)
        if grid is None:
            raise ShapeError("grid", None, "a grid of two axes", "Pass grid=(H, W).")
        r, (height, width) = self.inner, grid
        mixed: list[Op] = []
        for columns, length in ((n, r), (width * r, height), (height * r, width)):
            if self.config.form == "softmax":
                mixed.append(Op("attention", (1, columns, columns, length)))
            else:
                mixed += [Op("matmul", (1, length, columns, length)), Op("matmul", (1, columns, length, length))]
        return [linear_op(n, self.embed), *mixed, linear_op(n, self.proj)]


class _Mode(NamedTuple):
    """How to unfold (B, H, W, 3, r): the grid axis along the columns, the other axis, and the inverse permutation."""

    along: int
    other: int
    back: tuple[int, int, int]


_HEIGHT, _WIDTH = _Mode(1, 2, (3, 1, 2)), _Mode(2, 1, (1, 3, 2))


@register(TesaMixer)
@dataclass(frozen=True, kw_only=True)
class TesaConfig(PrefixedGridConfig):
    """Options of TESA.

    Args:
        reduction: D / r; r is rounded up.
        form: "softmax", or "dot_product" (a polynomial).
        grid: (H, W) of the tokens after the prefix, unless passed in the call.
    """

    name: ClassVar[str] = "tesa"
    output: ClassVar[str] = "attention along the modes H, W and C"
    cost_formula: ClassVar[str] = (
        "4 N D r + 2 N² r + 2 H W r² (H + W); 4 N D r + 2 N r² + 2 H W r (H + W) if form = dot_product; "
        "where r = ⌈D / reduction⌉"
    )
    sees: ClassVar[str] = "everything"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # of Poly-NL's Section 5.1.2, and of its equations
        "paper": {"bias": False, "reduction": 2}, "equations": {"bias": False},
    }  # fmt: skip
    reduction: int = 4
    form: str = "softmax"

    def check(self) -> None:
        check_int("reduction", self.reduction, 1)
        check_choice("form", self.form, ("softmax", "dot_product"))
        check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        if self.grid is not None:
            check_grid_option(self.grid, (2,))
