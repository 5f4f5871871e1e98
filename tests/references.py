"""The equations that everything is held against, by name: padre, pom, qt, poly_nl, poly_sa, softmax, local, linear_floor."""

from polymix.ops.padre.reference import padre
from polymix.ops.pom.reference import pom
from polymix.ops.pooled.reference import poly_nl, poly_sa
from polymix.ops.qt.reference import qt
from polymix.ops.related.reference import linear_floor, local, softmax
from polymix.ops.shared.reference import mix_tokens, plus, turn

__all__ = ["linear_floor", "local", "mix_tokens", "padre", "plus", "poly_nl", "poly_sa", "pom", "qt", "softmax", "turn"]
