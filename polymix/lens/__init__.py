"""Measure what a mixer, or any module, is as a function of its input."""

from polymix.lens.as_padre import as_padre
from polymix.lens.chains import Chain, PadreForm, register_form
from polymix.lens.contextual_mapping import ContextualMapping, contextual_mapping
from polymix.lens.degree import DegreeResult, Evidence, degree
from polymix.lens.distance import Distance, distance
from polymix.lens.equivariance import Equivariance, Verdict, equivariance
from polymix.lens.influence import Influence, influence
from polymix.lens.interactions import Count, Interactions, interactions
from polymix.lens.overview import Overview, overview
from polymix.lens.polynomial_layer import PolynomialLayer
from polymix.lens.receptive_field import ReceptiveField, receptive_field
from polymix.lens.tensor import WeightTensor, tensor

__all__ = [
    "Chain", "ContextualMapping", "Count", "DegreeResult", "Distance", "Equivariance", "Evidence", "Influence",
    "Interactions", "Overview", "PadreForm", "PolynomialLayer", "ReceptiveField", "Verdict", "WeightTensor", "as_padre",
    "contextual_mapping", "degree", "distance", "equivariance", "influence", "interactions", "overview",
    "receptive_field", "register_form", "tensor",
]  # fmt: skip
