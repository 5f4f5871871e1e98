"""The model that a recipe asks for: our vision transformer, or a host of timm, with a mixer in attention's place."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import torch
from torch import nn

from polymix.errors import OptionError, check_int
from polymix.limits import LAYERS
from polymix.mixers import MixerConfig
from polymix.models import VisionTransformer
from polymix.tasks.classify.data import ImageSets
from polymix.tasks.classify.recipe import ImageRecipe
from polymix.tasks.classify.stream import transforms

HEADS = ("head", "classifier", "fc")  # of our model, and of the hosts of timm


def _options(recipe: ImageRecipe, channels: int, classes: int) -> dict[str, Any]:
    return {
        "image_size": recipe.image_size, "patch_size": recipe.patch_size, "dim": recipe.dim, "depth": recipe.depth,
        "mlp_ratio": recipe.mlp_ratio, "class_token": recipe.class_token, "channels": channels, "classes": classes,
    }  # fmt: skip


def _host_options(recipe: ImageRecipe, channels: int, classes: int) -> dict[str, Any]:
    match = "parameters" if recipe.match_parameters else None
    options = {
        "num_classes": classes, "in_chans": channels, "img_size": recipe.image_size, "match": match,
        "drop_path_rate": recipe.drop_path, "depth": recipe.host_depth, "plan": recipe.plan,
    }  # fmt: skip
    return {name: value for name, value in options.items() if value is not None}


def _mixers(recipe: ImageRecipe) -> list[MixerConfig]:
    """The mixer of each block of our own model, with as many parameters as attention where the recipe asks for it."""
    check_int("depth", recipe.depth, 1, LAYERS)
    layers = [f"blocks.{place}" for place in range(recipe.depth)]
    return list(recipe.mixers_for(layers, recipe.dim if recipe.match_parameters else None).values())


def _build(recipe: ImageRecipe, channels: int, classes: int, **kw: Any) -> nn.Module:
    if recipe.host is None:
        return VisionTransformer(_mixers(recipe), **_options(recipe, channels, classes), **kw)
    from polymix.timm import create

    return create(recipe.mixer, recipe.host, **_host_options(recipe, channels, classes))


def check(recipe: ImageRecipe) -> None:
    """Raise what `build` and the transforms would raise about the recipe, before any image is read."""
    transforms(recipe)
    if recipe.host is None:
        _build(recipe, 3, 2, device="meta")
        return
    with torch.device("meta"):
        try:
            model = _build(recipe, 3, 2).eval()
        except TypeError as error:  # of timm, for an option that the host does not take
            got = f"{recipe.host} with {error}"
            raise OptionError("host", got, "a host that takes these options", "Leave host_depth out.") from error
        first = next(part for part in model.modules() if isinstance(part, nn.Conv2d))
        patch = first.stride[0] if first.stride == first.kernel_size else 1
        for side in dict.fromkeys((recipe.image_size, *(recipe.sizes or ()))):
            name = "sizes" if side != recipe.image_size else "image_size"
            if side % patch:  # timm leaves the rest of the image out
                raise OptionError(name, f"{side} for {recipe.host}", f"a multiple of its patches of {patch}", "")
            try:
                model(torch.empty(1, 3, side, side))
            except (NotImplementedError, RuntimeError) as error:
                if "meta" not in str(error):  # XCiT reads values, which the meta device has not
                    raise OptionError(name, f"{side} for {recipe.host}: {error}", "another size", "") from error
            except (AssertionError, ValueError) as error:
                got = f"{side} for {recipe.host} with {recipe.mixer}: {error}"
                raise OptionError(name, got, "a size that the host can take", "Try 224, without sizes.") from error


def build(recipe: ImageRecipe, data: ImageSets) -> nn.Module:
    """The model with fresh weights."""
    return _build(recipe, data.images.channels, len(data.images.classes))


def host_name(recipe: ImageRecipe) -> str:
    return recipe.host or "VisionTransformer"


def usage(recipe: ImageRecipe, data: ImageSets, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    channels, classes = data.images.channels, len(data.images.classes)
    if recipe.host is None:
        words = ", ".join(f"{name}={value!r}" for name, value in _options(recipe, channels, classes).items())
        lines = ["from polymix.models import VisionTransformer"]
        made = f"VisionTransformer(parse_mixer({recipe.mixer!r})[1], {words})"
        if recipe.match_parameters or recipe.plan:
            lines = ["from polymix.tasks.saved import SavedRun"]
            return [*lines, "", f"model = SavedRun.of({str(folder)!r}).load()"]
        lines = ["from polymix.mixers.spec import parse_mixer", *lines]
    else:
        words = ", ".join(f"{name}={value!r}" for name, value in _host_options(recipe, channels, classes).items())
        lines = ["from polymix.timm import create"]
        made = f"create({recipe.mixer!r}, {recipe.host!r}, {words})"
    load = f"model.load_state_dict(torch.load({str(folder / 'model.pt')!r}))"
    return ["import torch", *lines, "", f"model = {made}", load]


def next_commands(recipe: ImageRecipe, data: ImageSets, folder: Path) -> list[tuple[str, str]]:
    """What to run next, and why, for the report."""
    command = "polymix compare" + (f" --data {shlex.quote(recipe.data)}" if recipe.data else "")
    return [("Compare all mixers on these images:", command)]
