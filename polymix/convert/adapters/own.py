"""polymix's own softmax attention, which our hosts hold."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.attention import Attention, linear, thirds
from polymix.mixers import SoftmaxMixer
from polymix.mixers.inheritance import Projection


@register_adapter(SoftmaxMixer)
class SoftmaxAdapter(Adapter):
    """Called as the mixer itself is."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> Attention:
        assert isinstance(module, SoftmaxMixer)
        query, key, value = thirds(linear(module, "qkv.qkv"))
        grid = module.config.grid or host.grid()
        table = None if module.table is None else Projection(module.table, None, ("table",))
        return Attention(
            dim=module.dim, heads=module.heads, query=query, key=key, value=value, out=linear(module, "proj"),
            grid=grid, prefix=host.prefix(), dropout=module.config.dropout, relative=table, rotary=module.config.rotary,
        )  # fmt: skip

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        return self.mixer(x, context, **{**self.place(x, options.pop("grid", None)), **options})
