"""The kernels of decoding: one more token of each of a few sequences, on a CPU without gradients, in C.

linear          a linear map of a few rows, by its kernel or in plain PyTorch
try_linear, try_feed_forward, try_rms_norm, try_attention, try_convolution
                the result of the kernel, or None if it cannot run or would not be faster
call_pom_step   a step of PoM by its kernel; `polymix.ops.pom_chunk` chooses it like its other implementations

Each kernel reads every weight once, in its own dtype, which takes a half to a quarter of the time of PyTorch's
products of so few rows.
"""

from polymix.ops.decode.attention import try_attention
from polymix.ops.decode.convolution import try_convolution
from polymix.ops.decode.pom import call_pom_step
from polymix.ops.decode.rows import ACTIVATIONS, MAX_ROWS, linear, try_feed_forward, try_linear, try_rms_norm

__all__ = [
    "ACTIVATIONS", "MAX_ROWS", "call_pom_step", "linear", "try_attention", "try_convolution", "try_feed_forward",
    "try_linear", "try_rms_norm",
]  # fmt: skip
