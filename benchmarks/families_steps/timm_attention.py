"""Every class of attention in timm's models, each in a small model that has it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn

from polymix.compat import cure_torchvision

cure_torchvision()
import timm  # noqa: E402 (torchvision is cured first)
from timm.models import _registry as registry  # noqa: E402

from .sizes import DEPTH, LARGEST  # noqa: E402

NAMES = re.compile(r"\w*(Att(entio)?n|MHSA|XCA|MultiQuery)\w*$")
# These weight channels, pixels or branches by a gate, or are blocks around attention.
OTHERS = re.compile(
    r"\w*(Attn|Attention)Block$|XCABlock$|LayerScaleBlockClassAttn$|(Parallel)?PartitionAttention\w*$|(Light)?(Channel|Spatial)Attn$|"
    r"\w*(Coord|Strip|Local|Channel|Kernel|Split)Attn$|BilinearAttnTransform$|MobileAttention$|BottleneckAttn$"
)
TRIED, FILES = 4, 4  # models of a file that may have a class, and files
# Where the first model by name is not the best one, or the file of the class is not that of its models.
KNOWN = {
    "swin_transformer.WindowAttention": "swin_tiny_patch4_window7_224",
    "attention.Attention": "vit_tiny_patch16_224", "beit.Attention": "beit_base_patch16_224",
    "attention2d.MultiQueryAttention2d": "mobilenetv4_hybrid_medium", "halo_attn.HaloAttn": "halonet26t",
    "attention_pool2d.AttentionPool2d": "resnet50_clip",
    "diff_attention.DiffAttention": "vit_dwee_patch16_reg1_gap_256",
}  # fmt: skip
SMALL = re.compile("tiny|nano|small|xxs|test|pico|femto|_s|_t|0")
SMALLER = ({"img_size": 64, "depth": DEPTH}, {"depth": DEPTH}, {"img_size": 64}, {})


def _classes() -> dict[str, type]:
    """The classes of attention, by file and name."""
    modules = [
        (name, module) for name, module in sys.modules.items() if name.startswith(("timm.models.", "timm.layers."))
    ]
    return {
        f"{name.rpartition('.')[2]}.{label}": kind
        for name, module in modules for label, kind in vars(module).items()
        if inspect.isclass(kind) and issubclass(kind, nn.Module) and kind.__module__ == name
        and NAMES.match(label) and not OTHERS.match(label)
    }  # fmt: skip


def kinds() -> list[str]:
    return sorted(_classes())


def _models(kind: type) -> list[str]:
    """Names of models of the files that know a class, a few of each: first of the file that defines it."""
    files = [
        file for file in registry._module_to_models
        if getattr(sys.modules[f"timm.models.{file}"], kind.__name__, None) is kind
    ]  # fmt: skip
    files = sorted(files, key=lambda file: (not kind.__module__.endswith(file), file))[:FILES]
    small_first = [sorted(registry._module_to_models[file], key=lambda name: (SMALL.search(name) is None, name))
                   for file in files]  # fmt: skip
    return [name for names in small_first for name in names[:TRIED]]


def _model(of: type) -> str:
    """The first of the models that has a class."""
    for name in _models(of):
        with suppress(Exception), torch.device("meta"):
            if any(type(part) is of for part in timm.create_model(name, num_classes=3).modules()):
                return name
    raise ValueError("no model has this class")


def candidates(kind: str) -> Iterator[nn.Module]:
    """A model with this class, with two blocks of 64 × 64 pixels where it can be built so."""
    of = _classes()[kind]
    name = KNOWN.get(kind) or _model(of)
    for options in SMALLER:
        with suppress(TypeError, AssertionError, RuntimeError, ValueError):
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=3, **options).eval()
            count = sum(p.numel() for p in model.parameters())
            if count < LARGEST and any(type(part) is of for part in model.modules()):
                yield model
