"""Every class of attention in timm's models, each in the smallest model found that has it."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache

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
        or kind.__module__ == "timm.layers.attention_pool2d"
    ]  # fmt: skip
    files = sorted(files, key=lambda file: (not kind.__module__.endswith(file), file))[:FILES]
    small_first = [sorted(registry._module_to_models[file], key=lambda name: (SMALL.search(name) is None, name))
                   for file in files]  # fmt: skip
    return [name for names in small_first for name in names[:TRIED]]


@cache
def _smallest(of: type) -> str:
    """The smallest of the models tried that has a class."""
    found = {}
    for name in _models(of):
        with suppress(Exception), torch.device("meta"):
            model = timm.create_model(name, num_classes=3)
            if any(type(part) is of for part in model.modules()):
                found[name] = sum(p.numel() for p in model.parameters())
    if not found:
        raise ValueError("no model has this class")
    return min(found, key=lambda key: found[key])


def candidates(kind: str) -> Iterator[nn.Module]:
    """The smallest model with this class, with two blocks of 64 × 64 pixels where it can be built so."""
    of = _classes()[kind]
    name = _smallest(of)
    for options in SMALLER:
        with suppress(TypeError, AssertionError, RuntimeError, ValueError):
            torch.manual_seed(0)
            model = timm.create_model(name, num_classes=3, **options).eval()
            count = sum(p.numel() for p in model.parameters())
            if count < LARGEST and any(type(part) is of for part in model.modules()):
                yield model
