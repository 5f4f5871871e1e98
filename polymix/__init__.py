"""Linear-time polynomial token mixers for PyTorch, in attention's place.

Names load when they are first used (PEP 562), so that `import polymix` and the command line's help need no PyTorch.
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymix import export as export
    from polymix import lens as lens
    from polymix.blocks import MixerBlock as MixerBlock
    from polymix.blocks import PolyMorpher as PolyMorpher
    from polymix.convert import Adapter as Adapter
    from polymix.convert import ConversionReport as ConversionReport
    from polymix.convert import convert as convert  # type: ignore[no-redef]
    from polymix.convert import insert as insert  # type: ignore[no-redef]
    from polymix.convert import load_pretrained as load_pretrained
    from polymix.convert import load_weights as load_weights
    from polymix.convert import register_adapter as register_adapter
    from polymix.convert import save_pretrained as save_pretrained
    from polymix.inference import optimize as optimize  # type: ignore[no-redef]
    from polymix.mixers import Capabilities as Capabilities
    from polymix.mixers import LinearFloorConfig as LinearFloorConfig
    from polymix.mixers import LinearFloorMixer as LinearFloorMixer
    from polymix.mixers import MixerConfig as MixerConfig
    from polymix.mixers import PadreConfig as PadreConfig
    from polymix.mixers import PadreMixer as PadreMixer
    from polymix.mixers import PadreState as PadreState
    from polymix.mixers import PolyNlConfig as PolyNlConfig
    from polymix.mixers import PolyNlMixer as PolyNlMixer
    from polymix.mixers import PolySaConfig as PolySaConfig
    from polymix.mixers import PolySaMixer as PolySaMixer
    from polymix.mixers import PoM as PoM
    from polymix.mixers import PomConfig as PomConfig
    from polymix.mixers import PomMixer as PomMixer
    from polymix.mixers import PomState as PomState
    from polymix.mixers import QtConfig as QtConfig
    from polymix.mixers import QtMixer as QtMixer
    from polymix.mixers import QtState as QtState
    from polymix.mixers import SoftmaxConfig as SoftmaxConfig
    from polymix.mixers import SoftmaxMixer as SoftmaxMixer
    from polymix.mixers import TokenMixer as TokenMixer
    from polymix.mixers import create_mixer as create_mixer
    from polymix.mixers import explain as explain  # type: ignore[no-redef]
    from polymix.mixers import list_mixers as list_mixers
    from polymix.mixers import register as register
    from polymix.parallel import parallelize as parallelize
    from polymix.polynomials import PolynomialReport as PolynomialReport
    from polymix.polynomials import polynomialize as polynomialize
    from polymix.structured import Cost as Cost
    from polymix.train.distill import distill as distill
    from polymix.workflows.convert import assess as assess
    from polymix.workflows.convert import push_to_hub as push_to_hub
    from polymix.workflows.recommend import recommend as recommend
    from polymix.workflows.search import search as search

__version__ = "0.1.0"

_MODULES = ("export", "lens")
_NAMES = {
    "polymix.blocks": ("MixerBlock", "PolyMorpher"),
    "polymix.convert": (
        "Adapter", "ConversionReport", "convert", "insert", "load_pretrained", "load_weights", "register_adapter",
        "save_pretrained",
    ),
    "polymix.inference": ("optimize",),
    "polymix.mixers": (
        "Capabilities", "LinearFloorConfig", "LinearFloorMixer", "MixerConfig", "PadreConfig", "PadreMixer",
        "PadreState", "PoM", "PolyNlConfig", "PolyNlMixer", "PolySaConfig", "PolySaMixer", "PomConfig", "PomMixer",
        "PomState", "QtConfig", "QtMixer", "QtState", "SoftmaxConfig", "SoftmaxMixer", "TokenMixer", "create_mixer",
        "explain", "list_mixers", "register",
    ),
    "polymix.parallel": ("parallelize",),
    "polymix.polynomials": ("PolynomialReport", "polynomialize"),
    "polymix.structured": ("Cost",),
    "polymix.train.distill": ("distill",),
    "polymix.workflows.convert": ("assess", "push_to_hub"),
    "polymix.workflows.recommend": ("recommend",),
    "polymix.workflows.search": ("search",),
}  # fmt: skip
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = [*_MODULES, *_MODULE_OF]


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, and keep it."""
    if name in _MODULES:
        return import_module(f"polymix.{name}")
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(_MODULE_OF[name]), name)
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`polymix.convert` is the function. Python would put the package of that name in its place once that is loaded."""

    @property
    def convert(self) -> Any:
        return import_module("polymix.convert").convert

    @convert.setter
    def convert(self, package: ModuleType) -> None:
        pass


sys.modules[__name__].__class__ = _Package
