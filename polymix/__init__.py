"""Linear-time polynomial token mixers for PyTorch, in attention's place."""

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

__version__ = "0.1.0"

__all__ = [
    "Capabilities", "Cost", "LinearFloorConfig", "LinearFloorMixer", "MixerBlock", "MixerConfig", "PadreConfig",
    "PadreMixer", "PadreState", "PoM", "PolyMorpher", "PolyNlConfig", "PolyNlMixer", "PolySaConfig", "PolySaMixer",
    "PomConfig", "PomMixer", "PomState", "QtConfig", "QtMixer", "QtState", "SoftmaxConfig", "SoftmaxMixer",
    "TokenMixer", "create_mixer", "explain", "lens", "list_mixers", "register",
]  # fmt: skip
