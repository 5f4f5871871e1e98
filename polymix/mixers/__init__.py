"""Token mixers: one file per mixer, all under the contract of `TokenMixer`."""

from polymix.mixers.config import MixerConfig, create_mixer
from polymix.mixers.explain import explain
from polymix.mixers.linear_floor import LinearFloorConfig, LinearFloorMixer
from polymix.mixers.mixer import Polynomial, TokenMixer
from polymix.mixers.padre import PadreMixer, PadreState
from polymix.mixers.padre_config import PadreConfig
from polymix.mixers.poly_nl import PolyNlConfig, PolyNlMixer
from polymix.mixers.poly_sa import PolySaConfig, PolySaMixer
from polymix.mixers.pom import PoM, PomConfig, PomMixer
from polymix.mixers.qt import QtConfig, QtMixer
from polymix.mixers.registry import Capabilities, config_class, list_mixers, mixer_class, register, register_later
from polymix.mixers.softmax import SoftmaxConfig, SoftmaxMixer
from polymix.ops.pom import PomState
from polymix.ops.qt import QtState

register_later("polymix.mixers.related")

__all__ = [
    "Capabilities", "LinearFloorConfig", "LinearFloorMixer", "MixerConfig", "PadreConfig", "PadreMixer",
    "PadreState", "PoM", "PolyNlConfig", "PolyNlMixer", "PolySaConfig", "PolySaMixer", "Polynomial", "PomConfig",
    "PomMixer", "PomState", "QtConfig", "QtMixer", "QtState", "SoftmaxConfig", "SoftmaxMixer", "TokenMixer",
    "config_class", "create_mixer", "explain", "list_mixers", "mixer_class", "register",
]  # fmt: skip
