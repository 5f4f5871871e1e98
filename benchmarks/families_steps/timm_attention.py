"""Every class of attention in timm's models, each in a small model that has it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from typing import Any

import torch
from torch import nn

from polymix.compat import cure_torchvision

cure_torchvision()
import timm  # noqa: E402 (torchvision is cured first)
from timm.models import _registry as registry  # noqa: E402

from .sizes import DEPTH, LARGEST  # noqa: E402

NAMES = re.compile(r"\w*(Att(entio)?n|[A-Z]+SA$|SHMA$|MLA$|XCA|MultiQuery)\w*$")
# What these names stand for beside attention over tokens. The patterns are of "file.Class".
OTHERS = {
    r"byobnet\.SelfAttnBlock|xcit\.\w+Block|cait\.LayerScaleBlock\w+|crossvit\.\w+Block|fastvit\.\w+Block|iformer\.\w+Block|"
    r"maxxvit\.\w*Partition\w+|_efficientnet_blocks\.MobileAttention": "a block around attention of another class",
    r"cbam\.\w*Channel\w+|eca\.\w+|davit\.Channel\w+": "mixes channels, not tokens",
    r"cbam\.\w*Spatial\w+|csatv2\.SpatialAttention|coord_attn\.\w+": "a gate on each channel or place",
    r"selective_kernel\.\w+|split_attn\.\w+": "weighs branches of convolutions",
    r"efficientvit_msra\.LocalWindowAttention": "windows around CascadedGroupAttention",
    r"nextvit\.ConvAttention": "a convolution",
    r"non_local_attn\.BilinearAttnTransform": "a part of BatNonLocalAttn",
}
UNUSED = "no model that timm registers has it"
TRIED, FILES = 6, 4  # models of a file that may have a class, and files
# Where the class is chosen by an option, or the file of the class is not that of its models.
KNOWN: dict[str, tuple[str, dict[str, Any]]] = {
    "attention.Attention": ("vit_tiny_patch16_224", {}),
    "attention2d.MultiQueryAttention2d": ("mobilenetv4_hybrid_medium", {}),
    "attention_pool.AttentionPoolPrr": ("vit_tiny_patch16_224", {"global_pool": "prr"}),
    "attention_pool2d.AttentionPool2d": ("resnet50_clip", {}),
    "attention_pool2d.RotAttentionPool2d": ("resnet50_clip", {"head_type": "attn_rot"}),
    "bottleneck_attn.BottleneckAttn": ("botnet26t_256", {}), "halo_attn.HaloAttn": ("halonet26t", {}),
    "diff_attention.DiffAttention": ("vit_dwee_patch16_reg1_gap_256", {}),
    "non_local_attn.BatNonLocalAttn": ("bat_resnext26ts", {}),
    "non_local_attn.NonLocalAttn": ("resnet26d", {"block_args": {"attn_layer": "nl"}}),
}  # fmt: skip
SMALL = re.compile(r"tiny|nano|small|xxs|test|pico|femto|_[stm]?\d?(?![a-z0-9])")
SMALLER: tuple[dict[str, Any], ...] = (
    {"img_size": 64, "depth": DEPTH}, {"img_size": 64, "depths": (1, 1, DEPTH, 1)}, {"depth": DEPTH},
    {"depths": (1, 1, DEPTH, 1)}, {"img_size": 64}, {},
)  # fmt: skip


def _classes() -> dict[str, type]:
    """The classes whose names speak of attention, by file and name."""
    modules = [
        (name, module) for name, module in sys.modules.items() if name.startswith(("timm.models.", "timm.layers."))
    ]
    return {
        f"{name.rpartition('.')[2]}.{label}": kind
        for name, module in modules for label, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == name and NAMES.match(label)
    }  # fmt: skip


def left_out() -> dict[str, str]:
    """The classes with such a name that are not tried, and why."""
    reasons: dict[str, str] = {}
    for name, kind in sorted(_classes().items()):
        why = next((why for rule, why in OTHERS.items() if re.fullmatch(rule, name)), None)
        if why or not (name in KNOWN or _files(kind)):
            reasons[name] = why or UNUSED
    return reasons


def attention_class(kind: str) -> type:
    """The class that a model of this family is tried for."""
    return _classes()[kind]


def kinds() -> list[str]:
    return sorted(_classes().keys() - left_out().keys())


@cache
def _files(kind: type) -> list[str]:
    """The files of models that know a class, first the one that defines it."""
    files = [
        file for file in registry._module_to_models
        if getattr(sys.modules.get(f"timm.models.{file}"), kind.__name__, None) is kind
    ]  # fmt: skip
    return sorted(files, key=lambda file: (not kind.__module__.endswith(file), file))[:FILES]


def _count(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters())


def _model(of: type) -> str:
    """The smallest of the first models of each file that have a class; of all its models, where the first have none."""
    sizes: dict[str, int] = {}
    for file in _files(of):
        names = sorted(registry._module_to_models[file], key=lambda name: (SMALL.search(name) is None, name))
        for place, name in enumerate(names):
            if sizes and place >= TRIED:
                break
            with suppress(Exception), torch.device("meta"):  # of timm, by no common class
                model = timm.create_model(name, num_classes=3)
                if any(type(part) is of for part in model.modules()):
                    sizes[name] = _count(model)
    if not sizes:
        raise ValueError("no model has this class")
    return min(sizes, key=lambda name: sizes[name])


def candidates(kind: str) -> Iterator[nn.Module]:
    """A model with this class, with few blocks and of 64 × 64 pixels where it can be built so."""
    of = _classes()[kind]
    name, chosen = KNOWN.get(kind) or (_model(of), {})
    for options in SMALLER:
        with suppress(Exception):  # of timm, by no common class: not every model has each option
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=3, **options, **chosen).eval()
            if _count(model) < LARGEST and any(type(part) is of for part in model.modules()):
                yield model
