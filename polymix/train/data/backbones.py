"""Backbones of timm, and of polymix.timm, that return maps of several strides."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from polymix.compat import cure_torchvision
from polymix.convert.adapters.libraries import load_library
from polymix.errors import OptionError

FIRST_STRIDE = 4  # of the first stage


def places_of_maps(name: str, strides: Sequence[int], **options: Any) -> tuple[int, ...]:
    """Which of a backbone's maps have these strides, as `out_indices` counts them. Nothing is computed.

    Args:
        options: of `timm.create_model`, such as output_stride.
    Raises:
        OptionError: no model has the name, it returns no such maps, or takes images of one size alone.
        MissingExtraError: timm is not installed.
    """
    cure_torchvision()
    timm = load_library("timm")
    import polymix.timm  # noqa: F401  # registers qt_vit_b0 and others

    cure = "For example, efficientvit_b0 or qt_vit_b0."
    if not timm.is_model(name):
        raise OptionError("backbone", repr(name), "the name of a model of timm", f"{cure} timm.list_models() has all.")
    try:
        with torch.device("meta"):
            model: Any = timm.create_model(name, pretrained=False, features_only=True, **options).eval()
    except (RuntimeError, NotImplementedError, AttributeError, TypeError) as error:
        extra = "".join(f" and {option}={value}" for option, value in options.items())
        got = f"{name!r}, which returns no maps{extra and ' with ' + extra[5:]}"
        raise OptionError("backbone", got, "a model of timm with features_only" + extra, cure) from error
    reductions = model.feature_info.reduction()
    if any(stride not in reductions for stride in strides):
        got = f"{name!r} with maps of strides {', '.join(map(str, reductions))}"
        allowed = f"one with strides {', '.join(map(str, strides[:-1]))} and {strides[-1]}"
        raise OptionError("backbone", got, allowed, cure)
    try:
        with torch.no_grad():
            model(torch.empty(1, 3, 64, 96, device="meta"))
    except AssertionError as error:
        got = f"{name!r}, which takes images of one size"
        raise OptionError("backbone", got, "one for images of any size", cure) from error
    except RuntimeError:  # it reads values, which the meta device does not have
        pass
    return tuple(model.feature_info.out_indices[reductions.index(stride)] for stride in strides)


def freeze_start(backbone: Any) -> None:
    """The stem and first stage of a model of timm that returns maps do not learn, as DETR and Mask R-CNN have it."""
    later = [level["module"] for level in backbone.feature_info.info if level["reduction"] > FIRST_STRIDE]
    stages = tuple(form for level in later for form in (f"{level}.", f"{level.replace('.', '_')}."))
    for name, parameter in backbone.named_parameters():
        if not name.startswith(stages):
            parameter.requires_grad_(False)
