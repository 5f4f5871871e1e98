"""What a mixer costs on this machine: time, memory, against its floor and against attention."""

from polymix.bench.floor import floor
from polymix.bench.machine import manifest
from polymix.bench.measure import Timing, interleaved, peak_memory
from polymix.bench.sweep import Budget, Row, sweep

__all__ = ["Budget", "Row", "Timing", "floor", "interleaved", "manifest", "peak_memory", "sweep"]
