"""Conv2Former's convolutional modulation."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, check_choice, check_grid_option, check_int
from polymix.mixers.checks import MixerCall, check_grid
from polymix.mixers.config import PrefixedGridConfig
from polymix.mixers.loading import check_keys, load, translate
from polymix.mixers.mixer import INIT_STD, Polynomial, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.shared.activations import ACTIVATIONS
from polymix.ops.shared.depthwise import depthwise_conv, effective_kernel
from polymix.ops.shared.prefix import PrefixMap
from polymix.ops.shared.sequences import without_padding
from polymix.structured.compose import beside_prefix_matrix
from polymix.structured.conv import conv_matrix
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

NORM_EPS = 1e-6


class Conv2FormerMixer(TokenMixer):
    """Convolutional modulation: a large convolution of the neighbourhood multiplies the values (Conv2Former).

        n = LayerNorm(X), or X with norm=None
        A = DConv_{k×k}(g(n W_1 + b_1)) + b_A,   V = n W_2 + b_2
        Y = (A ⊙ V) W_3 + b_3

    The authors' code has g = GELU and the norm. PADRe's appendix (Eq. 28-30) has neither, which makes Y a polynomial
    of degree 2, homogeneous without biases. Padding ends a 2-D grid, is skipped in 1-D, and gets zeros before W_3.

    Prefix tokens (class token, registers) lie outside the grid. For prefix token j the convolution's place is taken by
    prefix_self[j] ⊙ its own g(n W_1 + b_1) + prefix_mean[j] ⊙ the grid's mean of them, as in `padre`. The grid does
    not see the prefix.

    Raises: ShapeError without a grid of the tokens.

    Shapes: (B, N, D) on a 2-D or 1-D grid, or (B, D, H, W), returned alike.
    Source: Hou et al. (2022); PADRe, Eq. 28-34.
    """

    name = "conv2former"
    capabilities = Capabilities(masks=frozenset({"padding"}), grids=(1, 2), sequence="halo")
    feature_maps = True
    config: Conv2FormerConfig

    def __init__(self, config: Conv2FormerConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        self.axes = 2 if config.grid is None else len(config.grid)
        parts = None if config.num_prefix_tokens else "halo"  # the prefix reads the mean of the whole grid
        self.capabilities = replace(type(self).capabilities, grids=(self.axes,), sequence=parts)
        kernel = (config.kernel_size,) * self.axes
        self.norm = nn.LayerNorm(dim, eps=NORM_EPS, **kw) if config.norm == "layer" else None
        self.into = Dense(dim, 2 * dim, config.bias, **kw)  # W_1 and W_2 read the same tokens
        self.conv = nn.Parameter(torch.empty(dim, 1, *kernel, **kw))
        self.conv_bias = nn.Parameter(torch.zeros(dim, **kw)) if config.bias else None
        prefix = config.num_prefix_tokens
        self.prefix_self = nn.Parameter(torch.ones(prefix, dim, **kw)) if prefix else None
        self.prefix_mean = nn.Parameter(torch.ones(prefix, dim, **kw)) if prefix else None
        self.proj = Dense(dim, dim, config.bias, **kw)
        with torch.no_grad():
            self.conv.normal_(std=config.kernel_size ** (-self.axes / 2))
            self.proj.weight *= INIT_STD

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        grid = call.grid
        if grid is None:
            cure = "Pass grid=(H, W) of this input, build with grid=, or pass (B, D, H, W)."
            raise ShapeError("grid", None, "the rows and columns of the tokens", cure)
        if self.axes == 1:
            p = self.config.num_prefix_tokens
            return self.proj(without_padding(x, call.mask, lambda x, real: self._modulate(x, grid, real), prefix=p))
        mask = call.mask
        if mask is not None:  # a NaN at padding must not reach the gradients of weights
            x = x.masked_fill(~mask.unsqueeze(-1), 0.0)
        z = self._modulate(x, grid, mask)
        return self.proj(z if mask is None else z.masked_fill(~mask.unsqueeze(-1), 0.0))

    def _modulate(self, x: Tensor, grid: tuple[int, ...], mask: Tensor | None) -> Tensor:
        a, v = self.into(x if self.norm is None else self.norm(x)).chunk(2, dim=-1)
        a = ACTIVATIONS[self.config.activation](a)
        if mask is not None:
            a = a.masked_fill(~mask.unsqueeze(-1), 0.0)
        if self.prefix_self is None or self.prefix_mean is None:
            a = depthwise_conv(a, self.conv, grid)
        else:
            first = PrefixMap(self.prefix_self, self.prefix_mean)(a, mask)
            y = depthwise_conv(a[:, self.config.num_prefix_tokens :], self.conv, grid)
            a = torch.cat((first.to(y.dtype), y), dim=1)
        return (a if self.conv_bias is None else a + self.conv_bias.to(a.dtype)) * v

    def halo(self) -> tuple[int, int]:
        return self.config.kernel_size // 2, self.config.kernel_size // 2

    @property
    def polynomial(self) -> Polynomial:
        if self.norm is not None or self.config.activation != "identity":
            return Polynomial()
        return Polynomial(2, homogeneous=not self.config.bias)

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        (w_1, w_2), bias = self.into.weight.chunk(2), self.into.bias
        b_1, b_2 = (None, None) if bias is None else bias.chunk(2)
        norm = (None, None) if self.norm is None else (self.norm.weight, self.norm.bias)
        return {
            "gain": norm[0], "offset": norm[1], "W_1": w_1.t(), "b_1": b_1, "W_2": w_2.t(), "b_2": b_2,
            "A": self._matrix(self._grid(n, grid)), "b_A": self.conv_bias,
            "W_3": self.proj.weight.t(), "b_3": self.proj.bias,
        }  # fmt: skip

    def _matrix(self, grid: tuple[int, ...]) -> Tensor:
        body = conv_matrix(self.conv, grid)
        if self.prefix_self is None or self.prefix_mean is None:
            return body
        return beside_prefix_matrix(body, self.prefix_self, self.prefix_mean)

    def _grid(self, n: int, grid: tuple[int, ...] | None) -> tuple[int, ...]:
        n -= self.config.num_prefix_tokens
        grid = check_grid(self, grid, n)
        if grid is None:
            raise ShapeError("grid", None, f"the rows and columns of {n} tokens", "Pass grid=(H, W).")
        return grid

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        grid = self._grid(n, grid)
        kernel = effective_kernel(tuple(self.conv.shape[2:]), grid)
        return [linear_op(n, self.into), Op("depthwise", grid, kernel, self.dim), linear_op(n, self.proj)]

    @classmethod
    def from_reference(cls, state_dict: Mapping[str, Tensor], **options: Any) -> Conv2FormerMixer:
        """A mixer with the weights of the authors' spatial attention, and the same outputs.

        From the state dict of a whole block, the keys that start with "attn." are used. index, num_head and mlp_ratio
        are accepted and ignored, as the authors do. Raises OptionError for keys or shapes that do not fit.
        """
        names = {"dim": None, "kernel_size": "kernel_size", "index": None, "num_head": None, "mlp_ratio": None}
        settings = translate(Conv2FormerConfig, options, names)
        part = {key[len("attn.") :]: value for key, value in state_dict.items() if key.startswith("attn.")}
        weights = part or dict(state_dict)
        layers = ("att.0", "att.2", "v", "proj")
        norm, biases = ("norm.weight", "norm.bias"), [f"{layer}.bias" for layer in layers]
        normed = settings.get("norm", "layer") == "layer"
        biased = any(key in weights for key in biases)
        keys = [f"{layer}.weight" for layer in layers] + (biases if biased else []) + list(norm if normed else ())
        check_keys(weights, keys)
        dim, size = weights["proj.weight"].shape[0], weights["att.2.weight"].shape[-1]
        for name, value in {"kernel_size": size, "bias": biased}.items():
            if settings.get(name, value) != value:
                raise OptionError(name, repr(settings[name]), f"{value!r}, as in the weights", f"Leave {name} out.")
        like = weights["proj.weight"]
        config = Conv2FormerConfig(**{**settings, "kernel_size": size, "bias": biased})
        mixer = cls(config, dim, device=like.device, dtype=like.dtype)

        def joined(kind: str) -> Tensor:
            return torch.cat((weights[f"att.0.{kind}"], weights[f"v.{kind}"]))

        new = {"into.weight": joined("weight").flatten(1), "proj.weight": like.flatten(1),
               "conv": weights["att.2.weight"]}  # fmt: skip
        if biased:
            new |= {"into.bias": joined("bias"), "proj.bias": weights["proj.bias"], "conv_bias": weights["att.2.bias"]}
        if normed:
            new |= {key: weights[key] for key in norm}
        if mixer.prefix_self is not None and mixer.prefix_mean is not None:  # which the authors do not have
            new |= {"prefix_self": mixer.prefix_self, "prefix_mean": mixer.prefix_mean}
        load(mixer, new)
        return mixer


@register(Conv2FormerMixer)
@dataclass(frozen=True, kw_only=True)
class Conv2FormerConfig(PrefixedGridConfig):
    """Options of Conv2Former.

    Args:
        grid: (H, W) or (N,); the kernel has as many axes. None: 2-D, with the grid passed in each call.
        kernel_size: along every axis, odd.
        activation: g: "gelu" as in the authors' code, or "identity" as in PADRe.
        norm: "layer", or None for no norm.
    """

    name: ClassVar[str] = "conv2former"
    output: ClassVar[str] = "an 11×11 convolution times the values"
    cost_formula: ClassVar[str] = (
        "3 N D² + (N - num_prefix_tokens) D taps; where taps = kernel_size², kernel_size in 1-D"
    )
    sees: ClassVar[str] = "a neighbourhood"
    kernel_size: int = 11
    activation: str = "gelu"
    norm: str | None = "layer"

    def check(self) -> None:
        if self.grid is not None:
            check_grid_option(self.grid, (1, 2))
        check_int("num_prefix_tokens", self.num_prefix_tokens, 0)
        check_int("kernel_size", self.kernel_size, 1)
        if self.kernel_size % 2 == 0:
            raise OptionError(
                "kernel_size", self.kernel_size, "an odd number", f"Pass {self.kernel_size + 1}, for example."
            )
        check_choice("activation", self.activation, ("gelu", "identity"))
        check_choice("norm", self.norm, ("layer", None))
