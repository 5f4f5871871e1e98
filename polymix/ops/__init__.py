"""Functions on tensors, without parameters: what a mixer computes. One folder an op, one call each.

padre, pom, qt, poly_sa, poly_nl    the polynomial mixers; `impl` chooses among eager, blocked, native and triton
gated                               the end that PoM and Poly-SA share
related                             the mechanisms that the papers compare with, in plain PyTorch
shared                              masks, sequences, rotary positions, activations, blocks, convolutions
native, dispatch                    the build of the kernels in C; the choice of an implementation
"""

from polymix.ops.gated import gated
from polymix.ops.padre import padre
from polymix.ops.pom import pom, pom_chunk
from polymix.ops.pooled import poly_nl, poly_sa
from polymix.ops.qt import qt, qt_chunk

__all__ = ["gated", "padre", "poly_nl", "poly_sa", "pom", "pom_chunk", "qt", "qt_chunk"]
