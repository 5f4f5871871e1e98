"""Linear-time polynomial token mixers for PyTorch, in attention's place."""

import importlib
import importlib.util
import sys
from typing import TYPE_CHECKING, Any

from polymix import renamed  # noqa: F401  finds modules by their old names


def _needs_no_torch() -> bool:
    """Whether this process prints help, as `polymix --help`, or checks exported files, perhaps without PyTorch."""
    if sys.orig_argv[1:3] == ["-m", "polymix.export.check"] or importlib.util.find_spec("torch") is None:
        return True
    words = sys.orig_argv[2:] if sys.orig_argv[1:2] == ["-m"] else sys.orig_argv[1:]
    command = words[0].replace("\\", "/").rpartition("/")[2] if words else ""
    asks = len(words) == 1 or {"-h", "--help", "--version"}.intersection(words)
    return command in ("polymix", "polymix.exe", "polymix.cli") and bool(asks)


if TYPE_CHECKING or not _needs_no_torch():
    from polymix import lens
    from polymix.blocks import MixerBlock, PolyMorpher
    from polymix.convert import (  # type: ignore[no-redef]
        Adapter,
        ConversionReport,
        convert,
        insert,
        load_pretrained,
        load_weights,
        register_adapter,
        save_pretrained,
    )
    from polymix.mixers import (  # type: ignore[no-redef]
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
    from polymix.inference import optimize as optimize  # type: ignore[no-redef]
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
    "optimize": "polymix.inference",
    "recommend": "polymix.workflows.recommend",
}
_MODULES = ("export",)
_CORE = ("polymix.blocks", "polymix.convert", "polymix.mixers", "polymix.structured")


def __getattr__(name: str) -> Any:
    """What measures, trains and optimizes is loaded when it is first asked for."""
    if name in _LATER:
        return getattr(importlib.import_module(_LATER[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"polymix.{name}")
    if name in __all__:  # in a process that needs no PyTorch
        found = (getattr(importlib.import_module(module), name, None) for module in _CORE)
        return next(filter(None, found), None) or importlib.import_module(f"polymix.{name}")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
