"""How timm's models lay out the tokens of a layer: on which grid, behind how many tokens in front, made by what."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from polymix.convert.adapter import Host, path
from polymix.convert.find import grids, prefix_tokens

Grid = tuple[int, ...]


class Layout(NamedTuple):
    """source: the module that makes the feature map. grid, prefix: of the tokens, as the model was built. any_length:
    whether it was built for images of any size."""

    source: nn.Module | None = None
    grid: Grid | None = None
    prefix: int = 0
    any_length: bool = False


def layout(host: Host) -> Layout:
    """By the nearest module around a layer that lays out its tokens."""
    for part in host.chain():
        if known := _KNOWN.get(path(type(part))):
            return known(part, host)
        if isinstance(getattr(part, "patch_embed", None), nn.Module):
            return _embedded(part)
    return Layout(grid=host.grid(), prefix=host.prefix())


def stage_grid(host: Host) -> Grid | None:
    """Of the feature maps of the stage that a layer is in, for images of the size that the model was made for."""
    around: list[Any] = list(host.chain())
    for model in around:
        size: Any = (getattr(model, "pretrained_cfg", None) or {}).get("input_size")
        stages = getattr(model, "feature_info", None)
        for stage in stages if size and isinstance(stages, list) else ():
            if model.get_submodule(stage["module"]) in around:
                return tuple(-(-side // stage["reduction"]) for side in size[-2:])
    return None


def grid_of(module: Any, args: Any, output: Any) -> Grid:
    """The grid in a call of a source."""
    if isinstance(output, tuple) and not isinstance(output[1], Tensor):  # with its size
        return tuple(output[1])
    if len(args) == 2 and not isinstance(args[1], Tensor):  # told its size
        return tuple(args[1])
    output = output[0] if isinstance(output, tuple) else output
    if output.ndim == 4:
        return tuple(output.shape[1:3] if getattr(module, "output_fmt", None) == "NHWC" else output.shape[2:])
    size = getattr(module, "dynamic_feat_size", None)
    return tuple(module.grid_size if size is None else size(args[0].shape[-2:]))


def _embedded(model: Any) -> Layout:
    embed, prefix = model.patch_embed, prefix_tokens(model)
    if getattr(getattr(model, "patch_drop", None), "prob", 0):  # what is left stands on no grid, in any order
        return Layout(prefix=prefix, any_length=True)
    return Layout(embed, next(grids(embed), None), prefix, getattr(embed, "strict_img_size", True) is False)


def _pit(model: Any, host: Host) -> Layout:
    around = list(host.chain())
    place = next(i for i, stage in enumerate(model.transformers) if stage in around)
    pool, size = model.transformers[place].pool, model.patch_embed.grid_size
    grid = tuple(-(-side // 2**place) for side in size)
    return Layout(model.patch_embed if pool is None else pool, grid, prefix_tokens(model))


def _crossvit(model: Any, host: Host) -> Layout:
    around = list(host.chain())
    branch = next(i for block in model.blocks for i, part in enumerate(block.blocks) if part in around)
    return Layout(None, next(grids(model.patch_embed[branch])), 1)


_KNOWN: dict[str, Any] = {
    "timm.models.crossvit.CrossVit": _crossvit,
    "timm.models.csatv2.TransformerBlock": lambda block, host: Layout(block.pos_embed),
    "timm.models.metaformer.MetaFormerStage": lambda stage, host: Layout(stage.downsample, stage_grid(host)),
    "timm.models.mobilevit.MobileVitBlock": lambda block, host: Layout(),  # a sequence for each place in a patch
    "timm.models.naflexvit.NaFlexVit": lambda model, host: Layout(prefix=prefix_tokens(model), any_length=True),
    "timm.models.pit.PoolingVisionTransformer": _pit,
}
