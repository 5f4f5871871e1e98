"""Efficient additive attention of transformers' SwiftFormer."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.spec import AttentionSpec, additive_spec

_PATH = "transformers.models.swiftformer.modeling_swiftformer.SwiftFormerEfficientAdditiveAttention"


@register_adapter(_PATH)
class SwiftFormerAdapter(Adapter):
    """Tokens of a feature map (B, N, D) -> (B, N, D).

    The layer's softmax runs over an axis of one entry, so that its weights are all 1: that is `additive` with
    weights="ones". Its parameter w_g plays no part.
    """

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        drops = {"w_g": "plays no part: the layer's softmax runs over an axis of one entry"}
        return replace(additive_spec(module, weights="ones"), any_length=True, drops=drops)

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return getattr(host.above(), "local_representation", None)

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x)
