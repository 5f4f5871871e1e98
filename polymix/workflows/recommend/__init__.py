"""`polymix.recommend` and `polymix recommend`: should I replace attention, and with which mixer?

run     the measurement, layer by layer
layers  the attention layers of a model, and what each is called with
decide  which candidate is worth it, by the rule of workflows/verdict
advice  the answer, as a table, sentences and JSON
"""

from polymix.measure.candidates import Candidate
from polymix.measure.shapes import Shape, parse_shape
from polymix.workflows.recommend.advice import LayerAdvice, Recommendation
from polymix.workflows.recommend.run import CANDIDATES, recommend

__all__ = ["CANDIDATES", "Candidate", "LayerAdvice", "Recommendation", "Shape", "parse_shape", "recommend"]
