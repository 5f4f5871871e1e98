"""torchvision: windowed attention of Swin and MaxViT, and how models are rebuilt. Its ViT uses torch.nn's attention."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.adapters.libraries import load_library
from polymix.convert.heads import MERGED, biased_by
from polymix.convert.model_recipes import Recipe, build_class, encode, known_arguments
from polymix.convert.spec import AttentionSpec, linear, thirds
from polymix.convert.windows import Shifted, check_regions
from polymix.errors import OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.inheritance import Projection

_TABLE = "relative_position_bias_table"


@register_adapter("torchvision.models.swin_transformer.ShiftedWindowAttention")
class ShiftedWindowAdapter(Adapter):
    """(B, H, W, D) -> (B, H, W, D), in padded and shifted windows as torchvision makes them, or on the whole map."""

    forward_attributes = ("window_size", "shift_size", "num_heads")
    needs_current_grid = False
    window_size: list[int]
    shift_size: list[int]

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: Any) -> None:
        super().__init__(mixer, attention, module)
        self.merged = attention.relative is None
        if self.merged:
            return
        if attention.grid != tuple(module.window_size):
            raise OptionError("grid", attention.grid, f"the window, {tuple(module.window_size)}", "Leave grid out.")
        if any(module.shift_size):
            check_regions(mixer)

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        query, key, value = thirds(linear(module, "qkv"))
        drops = {"attention_dropout": "applies to attention weights, which a mixer does not have"}
        drops = drops if module.attention_dropout else {}
        merged = host.windows == "merge"
        if merged:
            drops |= biased_by([_TABLE], MERGED)
        return AttentionSpec(
            dim=module.proj.out_features, heads=module.num_heads, query=query, key=key, value=value,
            out=linear(module, "proj"), dropout=module.dropout, drops=drops,
            relative=None if merged else Projection(module.get_parameter(_TABLE), None, (_TABLE,)),
            grid=None if merged else tuple(module.window_size),
        )  # fmt: skip

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        return module

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> tuple[int, ...]:
        return tuple(output.shape[1:3])

    def forward(self, x: Tensor) -> Tensor:
        size = tuple(x.shape[1:3])
        if self.merged:
            return self.mix(x.flatten(1, 2), grid=size).unflatten(1, size)
        (height, width), (h, w) = size, self.window_size
        rows, columns = -(-height // h), -(-width // w)
        full = (rows * h, columns * w)
        down, right = (0 if side <= of else by for side, of, by in zip(full, (h, w), self.shift_size, strict=True))
        x = F.pad(x, (0, 0, 0, full[1] - width, 0, full[0] - height)).roll((-down, -right), (1, 2))
        shifted = Shifted((h, w), (down, right))
        y = self._mix_windows(_windows(x, h, w), full, shifted)
        y = y.view(-1, rows, columns, h, w, x.shape[-1]).transpose(2, 3).reshape(x.shape).roll((down, right), (1, 2))
        return y[:, :height, :width].contiguous()

    def _mix_windows(self, x: Tensor, size: tuple[int, int], shifted: Shifted) -> Tensor:
        """Mix in each window; regions of a shifted one apart, as segments or one by one."""
        can, window = self.mixer.capabilities, shifted.window
        if not any(shifted.shift):
            return self.mix(x, grid=window)
        if not can.has("segments") and can.any_length:
            return shifted.mix_regions(x, size, lambda y, grid: self.mix(y, grid=grid))
        ids = shifted.regions(size, x.device)
        ids = ids.repeat(x.shape[0] // len(ids), 1)
        if can.has("segments"):
            return self.mix(x, grid=window, segments=ids)
        return self.mix(x, grid=window, mask=ids[:, :, None] == ids[:, None])


def _windows(x: Tensor, h: int, w: int) -> Tensor:
    """(B, rows · h, columns · w, D) -> (B · rows · columns, h · w, D)."""
    return x.unflatten(1, (-1, h)).unflatten(3, (-1, w)).transpose(2, 3).flatten(0, 2).flatten(1, 2)


@register_adapter("torchvision.models.maxvit.RelativePositionalMultiHeadAttention")
class PartitionAdapter(Adapter):
    """(B, windows or grids, N, D) -> (B, windows or grids, N, D)."""

    forward_attributes = ("n_heads", "head_dim", "size", "max_seq_len")

    @classmethod
    def describe(cls, module: Any, host: Host) -> AttentionSpec:
        if host.windows == "merge":
            raise OptionError("windows", "merge", "keep, for MaxViT's windows and grids", "Leave windows out.")
        query, key, value = thirds(linear(module, "to_qkv"))
        return AttentionSpec(
            dim=module.merge.out_features, heads=module.n_heads, query=query, key=key, value=value,
            out=linear(module, "merge"), scale=module.scale_factor, grid=(module.size, module.size),
            relative=Projection(module.get_parameter(_TABLE), None, (_TABLE,)),
        )  # fmt: skip

    def forward(self, x: Tensor) -> Tensor:
        return self.mix(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def read_recipes(model: Any) -> Iterator[Recipe]:
    """A recipe for each builder that returns the model's class; a model does not keep its builder's name."""
    models = load_library("torchvision.models")
    class_counts = [part.num_classes for part in model.modules() if type(getattr(part, "num_classes", None)) is int]
    heads = {name.rpartition(".")[2]: part for name, part in model.named_modules() if isinstance(part, nn.Linear)}
    head = heads.get("cls_score", next(reversed(heads.values()), None))
    classes = class_counts[0] if class_counts else getattr(head, "out_features", None)
    kwargs = known_arguments(model, {"num_classes": classes, "image_size": getattr(model, "image_size", None)})
    for name in models.list_models():
        if inspect.signature(models.get_model_builder(name)).return_annotation is type(model):
            frozen = any(type(part).__name__ == "FrozenBatchNorm2d" for part in model.modules())
            yield {"name": name, "kwargs": encode(kwargs), **({"frozen": True} if frozen else {})}


def build_model(recipe: Recipe, kwargs: dict[str, Any]) -> nn.Module:
    """A builder by name, or a class, with untrained weights."""
    if "class" in recipe:
        return build_class(recipe, kwargs)
    builder = load_library("torchvision.models").get_model_builder(recipe["name"])
    weights = {"weights", "weights_backbone"} & set(inspect.signature(builder).parameters)
    model = builder(**dict.fromkeys(weights), **kwargs)
    if recipe.get("frozen"):
        _freeze(model.backbone.body)
    return model


def _freeze(part: nn.Module) -> None:
    """Freeze the norms of a detector's backbone, as its builder does when it is given weights."""
    for name, child in part.named_children():
        if isinstance(child, nn.BatchNorm2d):
            frozen = load_library("torchvision.ops").FrozenBatchNorm2d
            setattr(part, name, frozen(child.num_features, eps=child.eps))
        _freeze(child)
