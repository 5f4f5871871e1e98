"""Linear-angular attention (Castling-ViT), with its depthwise branch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import OptionError, check_choice, check_int
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import Heads, head_count
from polymix.mixers.loading import attention_projections, check_keys, load, options_beyond_weights, translate
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.related.linear_attention import linear_attention
from polymix.ops.shared.causal_sums import hide
from polymix.ops.shared.depthwise import depthwise_conv
from polymix.ops.shared.sequences import without_padding
from polymix.ops.shared.tensors import accumulator
from polymix.structured.base import init_
from polymix.structured.conv import conv_after_prefix_matrix
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

SPARSE_THRESHOLD = 0.02
_AUTHORS = {"in_channels": None, "num_heads": "heads", "qkv_bias": None, "proj_drop": "dropout",
            "res_kernel_size": "kernel_size"}  # fmt: skip


class CastlingMixer(TokenMixer):
    """Linear-angular attention with a depthwise branch (Castling-ViT, inference form).

        T = (1/π) Q̂ (K̂ᵀ V) + ½ V,   Y = T / |T| + M V     per head; W_o joins the heads

    q̂ = q / |q| over the d channels of a head, and k̂ likewise. Rows of T are scaled to unit length (zero rows stay
    zero). M is a convolution along the sequence, with a kernel per head; padding is skipped. Not causal, because the
    kernel is centred. With normalize=False nothing is divided: Y = (1/π) Q (Kᵀ V) + (½ I + M) V, a polynomial of
    degree 3 with a linear term (PADRe, Eq. 76). The authors' code normalises. `sparse_reg` is their training form: it
    adds (A ⊙ [A > 0.02]) V to T, where A = softmax(Q Kᵀ / √d), which is quadratic in N. No gradient passes the
    threshold.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    Source: Castling-ViT (You et al. 2023); PADRe, Eq. 76-77.
    """

    name = "castling"
    capabilities = Capabilities(values=True, masks=frozenset({"padding"}), grids=(1,))
    config: CastlingConfig

    def __init__(self, config: CastlingConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.heads = head_count(config.heads, dim)
        self.qkv = Heads(dim, self.heads, config.bias, **kw)
        self.conv = nn.Parameter(torch.empty(self.heads, 1, config.kernel_size, **kw))
        self.proj = Dense(dim, dim, config.bias, **kw)
        d = dim // self.heads
        size = d**-0.5 if config.normalize else 0.5  # of T; the branch starts at the same size
        nn.init.normal_(self.conv, std=size * config.kernel_size**-0.5)
        init_(self.proj.weight, dim, INIT_STD / (size * 2**0.5))
        if not config.normalize:  # makes (1/π) Σ_j (q·k_j) v_j over 196 tokens as large as ½ v
            gain = (0.5 * math.pi / (14 * d**0.5)) ** 0.5
            init_(self.qkv.qkv.weight[: 2 * dim], dim, gain)

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        q, k, v = (hide(part.transpose(1, 2), call.mask) for part in self.qkv(x, x, call.values))
        q, k, wide = (part.to(accumulator(v.dtype)) for part in (q, k, v))
        unit_q, unit_k = (F.normalize(q, dim=-1), F.normalize(k, dim=-1)) if self.config.normalize else (q, k)
        t = wide / 2 + linear_attention(unit_q, unit_k, wide, mask=call.mask, normalize=False, scale=1 / math.pi)
        if self.config.sparse_reg:
            t = t + self._sparse(q, k, wide, call.mask)
        if self.config.normalize:
            t = F.normalize(t, dim=-1)
        t, v = (part.transpose(1, 2).flatten(-2) for part in (t.to(v.dtype), v))
        return self.proj(t + without_padding(v, call.mask, self._branch))

    def _branch(self, v: Tensor, real: Tensor | None) -> Tensor:
        return depthwise_conv(v, self._kernel(), (v.shape[1],))

    def _sparse(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
        logits = q @ k.transpose(-1, -2) * q.shape[-1] ** -0.5
        if mask is not None:
            logits = logits.masked_fill(~mask[:, None, None, :], torch.finfo(logits.dtype).min)
        weight = logits.softmax(-1)
        return weight.masked_fill(weight <= SPARSE_THRESHOLD, 0.0).to(v.dtype) @ v

    def _kernel(self) -> Tensor:
        return self.conv.repeat_interleave(self.dim // self.heads, dim=0)  # (D, 1, k)

    @property
    def polynomial(self) -> Polynomial:
        return Polynomial() if self.config.normalize or self.config.sparse_reg else Polynomial(3)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        return {**self.qkv.named_matrices(self.proj), "M": conv_after_prefix_matrix(self._kernel(), (n,))}

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        d = self.dim // self.heads
        ops = [self.qkv.op(n), Op("matmul", (self.heads, d, n, d)), Op("matmul", (self.heads, n, d, d))]
        if self.config.sparse_reg:
            ops.append(Op("attention", (self.heads, n, n, d)))
        return [*ops, Op("depthwise", (n,), (self.config.kernel_size,), self.dim), linear_op(n, self.proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> CastlingMixer:
        """A mixer with the weights of the authors' linear-angular attention, and the same outputs.

        `options` are arguments of their constructor (num_heads defaults to 8, attn_drop must be 0) or ours. A missing
        bias of qkv is zero.
        """
        check_keys(state_dict, ("qkv.weight", "proj.weight", "dconv.weight"), ("qkv.bias", "proj.bias"))
        check_choice("attn_drop", float(options.pop("attn_drop", 0.0)), (0.0,))
        settings = {"heads": 8, **translate(CastlingConfig, options, _AUTHORS)}
        conv = state_dict["dconv.weight"].flatten(2)
        own = {"bias": "proj.bias" in state_dict, "kernel_size": conv.shape[-1]}
        settings = options_beyond_weights(settings, own) | own
        like = state_dict["proj.weight"]
        mixer = cls(CastlingConfig(**settings), like.shape[0], device=like.device, dtype=like.dtype)
        load(mixer, {**attention_projections(state_dict), "conv": conv})
        return mixer


@register(CastlingMixer)
@dataclass(frozen=True, kw_only=True)
class CastlingConfig(HeadsConfig):
    """Options of linear-angular attention.

    Args:
        kernel_size: of the branch, odd.
        normalize: scale queries, keys and the rows of T to unit length, as the authors' code does; False for the
            plain polynomial.
        sparse_reg: add the quadratic sparse branch of the training form.
    """

    name: ClassVar[str] = "castling"
    output: ClassVar[str] = "linear-angular attention with a depthwise branch"
    cost_formula: ClassVar[str] = "4 N D² + 2 N D d + N D kernel_size; plus 2 N² D if sparse_reg"
    sees: ClassVar[str] = "everything"
    kernel_size: int = 9
    normalize: bool = True
    sparse_reg: bool = False

    def check(self) -> None:
        check_int("kernel_size", self.kernel_size, 1)
        check_choice("normalize", self.normalize, (True, False))
        check_choice("sparse_reg", self.sparse_reg, (True, False))
        if self.kernel_size % 2 == 0:
            raise OptionError(
                "kernel_size", self.kernel_size, "an odd size", f"Pass {self.kernel_size + 1}, for example."
            )
