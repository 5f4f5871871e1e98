"""polymix's own models: their attention is the softmax mixer."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.model_recipes import Recipe, class_path, encode, is_plain
from polymix.convert.model_recipes import build_class as build_model
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.mixers import SoftmaxMixer
from polymix.mixers.inheritance import Projection

__all__ = ["SoftmaxAdapter", "build_model", "read_recipes"]


@register_adapter(SoftmaxMixer)
class SoftmaxAdapter(Adapter):
    """Has the softmax mixer's own signature."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        assert isinstance(module, SoftmaxMixer)
        query, key, value = thirds(linear(module, "qkv.qkv"))
        grid = module.config.grid or host.grid()
        table = None if module.table is None else Projection(module.table, None, ("table",))
        return AttentionSpec(
            dim=module.dim, heads=module.heads, query=query, key=key, value=value, out=linear(module, "proj"),
            grid=grid, prefix=host.prefix(), dropout=module.config.dropout, relative=table, rotary=module.config.rotary,
        )  # fmt: skip

    def forward(self, x: Tensor, context: Tensor | None = None, **options: Any) -> Tensor:
        return self.mixer(x, context, **{**self.grid_options(x, options.pop("grid", None)), **options})


def read_recipes(model: Any) -> Iterator[Recipe]:
    """The model's class and options."""
    if isinstance(getattr(model, "options", None), Mapping) and is_plain(model.options):
        yield {"class": class_path(model), "kwargs": encode(model.options)}
