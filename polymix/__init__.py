"""Linear-time polynomial token mixers for PyTorch, in attention's place."""

from typing import TYPE_CHECKING, Any

from polymix import lens
from polymix.blocks import MixerBlock, PolyMorpher
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
    from polymix.compare.recommend import recommend as recommend

__version__ = "0.1.0"

__all__ = [
    "Capabilities", "Cost", "LinearFloorConfig", "LinearFloorMixer", "MixerBlock", "MixerConfig", "PadreConfig",
    "PadreMixer", "PadreState", "PoM", "PolyMorpher", "PolyNlConfig", "PolyNlMixer", "PolySaConfig", "PolySaMixer",
    "PomConfig", "PomMixer", "PomState", "QtConfig", "QtMixer", "QtState", "SoftmaxConfig", "SoftmaxMixer",
    "TokenMixer", "create_mixer", "explain", "lens", "list_mixers", "register",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    """What measures is to the right of the core, and is loaded when it is first asked for."""
    if name == "recommend":
        from polymix.compare.recommend import recommend

        return recommend
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
