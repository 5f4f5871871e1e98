"""What a mixer costs on this machine: time and memory, compared with its floor and with attention.

Nothing else in polymix reads a clock. Names load when they are first used; `Stopwatch` needs no PyTorch.

clock      the two clocks, wall and processor, and a stopwatch
timing     one call repeated, several in turn, medians with quantiles, peak memory of a call
case       a module with an input, ready to be called, and the check against float64
shapes     the sizes of an attention layer's call
memory     the memory of one call in a process of its own
floor      a mixer's own products and convolutions, run bare
roofline   the machine's ceilings
machine    hardware and versions
harness    the one loop that measures: prepare each contender, time them in turn, within a budget
sweep      mixers over token counts
candidates attention and mixers at one shape
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from polymix.measure.clock import Clock as Clock
    from polymix.measure.clock import Stopwatch as Stopwatch
    from polymix.measure.clock import check_clock as check_clock
    from polymix.measure.harness import Budget as Budget
    from polymix.measure.machine import manifest as manifest
    from polymix.measure.timing import Timing as Timing
    from polymix.measure.timing import in_turn as in_turn
    from polymix.measure.timing import interleaved as interleaved
    from polymix.measure.timing import once as once
    from polymix.measure.timing import peak_memory as peak_memory
    from polymix.measure.timing import repeated as repeated

_NAMES = {
    "clock": ("Clock", "Stopwatch", "check_clock"),
    "harness": ("Budget",),
    "machine": ("manifest",),
    "timing": ("Timing", "in_turn", "interleaved", "once", "peak_memory", "repeated"),
}
_MODULE_OF = {name: module for module, names in _NAMES.items() for name in names}

__all__ = list(_MODULE_OF)


def __getattr__(name: str) -> Any:
    """Load a name when it is first used, and keep it."""
    if name not in _MODULE_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{_MODULE_OF[name]}"), name)
    return value
