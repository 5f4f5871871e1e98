"""What the mixers compute, as functions of tensors without parameters: one folder and one public call for each op.

padre, pom, qt, poly_sa, poly_nl    the polynomial mixers; `impl` selects eager, blocked, native or triton
gated                               the output stage of PoM and Poly-SA: a gated linear map, then a projection
decode                              the kernels of decoding: one token of each of a few sequences
related                             the baselines that the papers compare with, in plain PyTorch
shared                              masks, sequences, rotary positions, activations, blocks, convolutions
native, dispatch                    building the C kernels; choosing an implementation
"""

from polymix.ops.gated import gated
from polymix.ops.padre import padre
from polymix.ops.pom import pom, pom_chunk, pom_read, pom_summary
from polymix.ops.pooled import poly_nl, poly_sa
from polymix.ops.qt import qt, qt_attention, qt_chunk, qt_continue, qt_read, qt_summary

__all__ = [
    "gated", "padre", "poly_nl", "poly_sa", "pom", "pom_chunk", "pom_read", "pom_summary", "qt", "qt_attention",
    "qt_chunk", "qt_continue", "qt_read", "qt_summary",
]  # fmt: skip
