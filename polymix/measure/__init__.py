"""What a mixer costs on this machine: time and memory, compared with its floor and with attention.

case       a module with an input, ready to be called, and the check against float64
shapes     the sizes of an attention layer's call
timing     medians of interleaved rounds, peak memory of a call
memory     the memory of one call in a process of its own
floor      a mixer's own products and convolutions, run bare
roofline   the machine's ceilings
machine    hardware and versions
harness    the one loop that measures: prepare each contender, time them in turn, within a budget
sweep      mixers over token counts
candidates attention and mixers at one shape
"""

from polymix.measure.floor import floor
from polymix.measure.harness import Budget
from polymix.measure.machine import manifest
from polymix.measure.sweep import Row, sweep
from polymix.measure.timing import Timing, interleaved, peak_memory

__all__ = ["Budget", "Row", "Timing", "floor", "interleaved", "manifest", "peak_memory", "sweep"]
