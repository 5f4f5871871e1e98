"""A mixer, or any module, seen as the function that it is."""

from polymix.lens.as_padre import as_padre
from polymix.lens.chains import Chain, PadreForm
from polymix.lens.contextual import ContextualMapping, contextual_mapping
from polymix.lens.degree import DegreeResult, Evidence, degree
from polymix.lens.equivariance import Equivariance, Verdict, equivariance
from polymix.lens.field import ReceptiveField, receptive_field
from polymix.lens.influence import Influence, influence
from polymix.lens.interactions import Count, Interactions, interactions
from polymix.lens.load import load
from polymix.lens.overview import Overview, overview

__all__ = [
    "Chain", "ContextualMapping", "Count", "DegreeResult", "Equivariance", "Evidence", "Influence", "Interactions",
    "Overview", "PadreForm", "ReceptiveField", "Verdict", "as_padre", "contextual_mapping", "degree", "equivariance",
    "influence", "interactions", "load", "overview", "receptive_field",
]  # fmt: skip
