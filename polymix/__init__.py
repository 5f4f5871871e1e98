"""Linear-time polynomial token mixers for PyTorch, in attention's place."""

import importlib
from typing import TYPE_CHECKING, Any

from polymix import lens, renamed  # noqa: F401  renamed: finds modules by their old names
from polymix.blocks import MixerBlock, PolyMorpher
from polymix.convert import (
    Adapter,
    ConversionReport,
    convert,
    insert,
    load_pretrained,
    load_weights,
    register_adapter,
    save_pretrained,
)
from polymix.mixers import (
    Capabilities,
    LinearFloorConfig,
    LinearFloorMixer,
    MixerConfig,
    PadreConfig,
    PadreMixer,
    PadreState,
    PolyNlConfig,
    PolyNlMixer,
    PolySaConfig,
    PolySaMixer,
    PoM,
    PomConfig,
    PomMixer,
    PomState,
    QtConfig,
    QtMixer,
    QtState,
    SoftmaxConfig,
    SoftmaxMixer,
    TokenMixer,
    create_mixer,
    explain,
    list_mixers,
    register,
)
from polymix.structured import Cost

if TYPE_CHECKING:
    from polymix.tasks.distill import distill as distill
    from polymix.workflows.convert import assess as assess
    from polymix.workflows.convert import push_to_hub as push_to_hub
    from polymix.workflows.recommend import recommend as recommend

__version__ = "0.1.0"

__all__ = [
    "Adapter", "Capabilities", "ConversionReport", "Cost", "LinearFloorConfig", "LinearFloorMixer", "MixerBlock",
    "MixerConfig", "PadreConfig", "PadreMixer", "PadreState", "PoM", "PolyMorpher", "PolyNlConfig", "PolyNlMixer",
    "PolySaConfig", "PolySaMixer", "PomConfig", "PomMixer", "PomState", "QtConfig", "QtMixer", "QtState",
    "SoftmaxConfig", "SoftmaxMixer", "TokenMixer", "convert", "create_mixer", "explain", "insert", "lens",
    "list_mixers", "load_pretrained", "load_weights", "register", "register_adapter", "save_pretrained",
]  # fmt: skip


_LATER = {
    "assess": "polymix.workflows.convert",
    "push_to_hub": "polymix.workflows.convert",
    "distill": "polymix.tasks.distill",
    "recommend": "polymix.workflows.recommend",
}


def __getattr__(name: str) -> Any:
    """What measures and trains is to the right of the core, and is loaded when it is first asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
