"""What a mixer costs on this machine: time, memory, against its floor and against attention."""

from polymix.measure.floor import floor
from polymix.measure.machine import manifest
from polymix.measure.sweep import Budget, Row, sweep
from polymix.measure.timing import Timing, interleaved, peak_memory

__all__ = ["Budget", "Row", "Timing", "floor", "interleaved", "manifest", "peak_memory", "sweep"]
