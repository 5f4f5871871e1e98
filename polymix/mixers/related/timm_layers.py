"""The one place that imports timm: classes of its layers, by name, with an error that says what to install."""

from __future__ import annotations

import importlib
from typing import Any

from polymix.compat import cure_torchvision
from polymix.errors import MissingExtraError

_WHERE = {
    "NonLocalAttn": "timm.layers",
    "SEModule": "timm.layers",
    "EffectiveSEModule": "timm.layers",
    "GlobalContext": "timm.layers",
    "LiteMLA": "timm.models.efficientvit_mit",
    "XCA": "timm.models.xcit",
}


def timm_layer(name: str) -> type[Any]:
    """The class `name` of timm; MissingExtraError where timm is not installed."""
    try:
        cure_torchvision()
        import timm
    except ImportError as error:
        cure = "pip install 'polymix[vision]'"
        raise MissingExtraError("timm", "not installed", f"timm, whose {name} this mixer wraps", cure) from error
    assert timm
    return getattr(importlib.import_module(_WHERE[name]), name)
