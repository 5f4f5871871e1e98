"""LatentGNN: tokens write to a few latent nodes, the nodes exchange messages, and tokens read them back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import check_choice, check_int
from polymix.mixers.checks import MixerCall
from polymix.mixers.config import MixerConfig
from polymix.mixers.mixer import INIT_STD, TokenMixer
from polymix.mixers.registry import Capabilities, register
from polymix.ops.shared.tensors import accumulator, without_autocast
from polymix.structured.cost import Op, linear_op
from polymix.structured.dense import Dense

_TINY = 1e-6  # a node without tokens, or a token without nodes, gives zero instead of 0/0


class LatentGnnMixer(TokenMixer):
    """LatentGNN: tokens write to a few latent nodes, the nodes exchange messages, and tokens read them back.

        V = X W_v,  R = X W_r                             D -> r = D / reduction channels
        Ψ_s = norm over the tokens of V W_ψ,s             N × latent
        Z_s = Ψ_sᵀ V,   Z'_s = A_s Z_s                    latent × r
        Φ_s = norm over the nodes of R W_φ,s + b_φ,s      N × latent
        Y = [Φ_1 Z'_1, …, Φ_S Z'_S] W_o + b_o             S = kernels

    With `graph` "learned", A_s is learned and starts as the identity. With "similarity" it is softmax(Ẑ_s Ẑ_sᵀ),
    where Ẑ_s are the nodes at unit length. `affinity` chooses the norm: a softmax, or "relu", which divides relu(·)
    by its sum. (The authors' code divides by the Euclidean norm; with a sum the first outputs are averages, as large as
    attention's.) `norm="batch"` puts a batch norm after each of the five maps, as the authors do. In training it mixes
    tokens and samples, so that form takes no masks. In the softmax form W_ψ has no bias, because it would shift
    all tokens alike. With a separate context its tokens write to the nodes, and those of X read.

    Shapes: (B, N, D) or (B, D, H, W), returned alike.
    Source: Zhang et al. (2019); settings of Poly-NL, Table 1a (0.13 G, 0.6 M at 14 × 14 × 1024).
    """

    name = "latent_gnn"
    capabilities = Capabilities(cross=True, masks=frozenset({"padding"}))
    feature_maps = True
    config: LatentGnnConfig

    def __init__(self, config: LatentGnnConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        nodes, bias = config.kernels * config.latent, config.bias
        self.inner = -(-dim // config.reduction)
        self.write = Dense(dim, self.inner, bias, **kw)  # W_v
        self.read = Dense(dim, self.inner, bias, **kw)  # W_r
        self.into = Dense(self.inner, nodes, bias and config.affinity == "relu", **kw)  # W_ψ
        self.back = Dense(self.inner, nodes, bias, **kw)  # W_φ
        self.proj = Dense(config.kernels * self.inner, dim, bias, **kw)  # W_o
        self.norms = nn.ModuleDict()
        if config.norm == "batch":
            widths = {"write": self.inner, "read": self.inner, "into": nodes, "back": nodes, "proj": dim}
            self.norms = nn.ModuleDict({name: nn.BatchNorm1d(width, **kw) for name, width in widths.items()})
            nn.init.constant_(self.get_parameter("norms.proj.weight"), INIT_STD)
            self.capabilities = Capabilities(cross=True)
        self.messages = None
        if config.graph == "learned":
            self.messages = nn.Parameter(torch.eye(config.latent, **kw).repeat(config.kernels, 1, 1))

    def mix(self, x: Tensor, context: Tensor, call: MixerCall) -> Tensor:
        dtype, shape, mask = accumulator(x.dtype), (self.config.kernels, self.config.latent), call.mask
        values, reader = self._mapped("write", context), self._mapped("read", x)
        if mask is not None:
            values = values.masked_fill(~mask.unsqueeze(-1), 0.0)
        into, back = (
            part.unflatten(-1, shape).transpose(1, 2)
            for part in (self._mapped("into", values), self._mapped("back", reader))
        )
        with without_autocast(x.device):
            into = self._normalised(into.to(dtype), 2, None if mask is None else mask[:, None, :, None])
            back = self._normalised(back.to(dtype), 3, None)  # (B, S, N, d)
            nodes = into.transpose(-1, -2) @ values.to(dtype).unsqueeze(1)  # (B, S, d, r)
            if self.messages is None:
                unit = F.normalize(nodes, dim=-1)
                affinity = (unit @ unit.transpose(-1, -2)).softmax(-1)
            else:
                affinity = self.messages.to(dtype)
            y = back @ (affinity @ nodes)  # (B, S, N, r)
        return self._mapped("proj", y.to(reader.dtype).transpose(1, 2).flatten(-2))

    def _mapped(self, name: str, x: Tensor) -> Tensor:
        """One of the five maps of x (B, N, ·), and its batch norm if there is one."""
        y: Tensor = self.get_submodule(name)(x)
        return self.norms[name](y.flatten(0, 1)).view_as(y) if name in self.norms else y

    def _normalised(self, x: Tensor, axis: int, mask: Tensor | None) -> Tensor:
        """Weights that sum to 1 along `axis`, over unmasked entries."""
        if self.config.affinity == "softmax":
            return (x if mask is None else x.masked_fill(~mask, torch.finfo(x.dtype).min)).softmax(axis)
        x = F.relu(x)
        x = x if mask is None else x.masked_fill(~mask, 0.0)
        return x / x.sum(axis, keepdim=True).clamp_min(_TINY)

    def no_weight_decay(self) -> set[str]:
        norms = {f"norms.{name}" for name, _ in self.norms.named_parameters()}
        return norms if self.messages is None else norms | {"messages"}

    def named_matrices(self, n: int, grid: tuple[int, ...] | None) -> dict[str, Any]:
        """W_psi and W_phi are (r, S · latent), kernel by kernel; A is (S, latent, latent), None for "similarity".

        A batch norm in evaluation is part of its map and bias.
        """
        names = {"v": self.write, "r": self.read, "psi": self.into, "phi": self.back, "o": self.proj}
        letters: dict[str, Any] = {"A": self.messages}
        for name, layer in names.items():
            letters |= {f"W_{name}": layer.dense(), f"b_{name}": layer.bias}
        for name, key in zip(names, self.norms, strict=False):
            norm: Any = self.norms[key]
            gain = norm.weight * torch.rsqrt(norm.running_var + norm.eps)
            bias = 0.0 if letters[f"b_{name}"] is None else letters[f"b_{name}"]
            letters |= {
                f"W_{name}": letters[f"W_{name}"] * gain,
                f"b_{name}": norm.bias + gain * (bias - norm.running_mean),
            }
        return letters

    def cost_ops(self, n: int, grid: tuple[int, ...] | None = None) -> list[Op]:
        s, d, r = self.config.kernels, self.config.latent, self.inner
        alike = [Op("matmul", (s, d, r, d))] if self.messages is None else []
        mixed = [Op("matmul", (s, d, n, r)), *alike, Op("matmul", (s, d, d, r)), Op("matmul", (s, n, d, r))]
        return [linear_op(n, layer) for layer in (self.write, self.read, self.into, self.back, self.proj)] + mixed


@register(LatentGnnMixer)
@dataclass(frozen=True, kw_only=True)
class LatentGnnConfig(MixerConfig):
    """Options of LatentGNN.

    Args:
        latent: number of nodes of each graph.
        kernels: number of graphs S.
        graph: "similarity" or "learned".
        affinity: "softmax" or "relu".
        reduction: D / r; r is rounded up.
        norm: None, or "batch": a batch norm after each map, as in the authors' code.
    """

    name: ClassVar[str] = "latent_gnn"
    output: ClassVar[str] = "tokens to a small graph and back"
    cost_formula: ClassVar[str] = (
        "N D r (kernels + 2) + 4 N r kernels latent + 2 r kernels latent²; "
        "minus r kernels latent² if graph = learned; where r = ⌈D / reduction⌉"
    )
    sees: ClassVar[str] = "everything"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {  # of Poly-NL's Section 5.1.2, with the authors' batch norms
        "paper": {"bias": True, "kernels": 2, "latent": 100, "reduction": 8, "norm": "batch"},
        "equations": {"bias": False, "norm": None},
    }  # fmt: skip
    latent: int = 100
    kernels: int = 2
    graph: str = "similarity"
    affinity: str = "softmax"
    reduction: int = 8
    norm: str | None = None

    def check(self) -> None:
        check_int("latent", self.latent, 1)
        check_int("kernels", self.kernels, 1)
        check_int("reduction", self.reduction, 1)
        check_choice("graph", self.graph, ("similarity", "learned"))
        check_choice("norm", self.norm, (None, "batch"))
        check_choice("affinity", self.affinity, ("softmax", "relu"))
