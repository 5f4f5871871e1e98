"""Converting models: mixers in the place of attention layers."""

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.convert import attention_layers, convert
from polymix.convert.insert import InsertionReport, insert
from polymix.convert.report import ConversionReport, LayerReport
from polymix.convert.saving import load_pretrained, save_pretrained
from polymix.convert.spec import AttentionSpec, EquivalentMixer, linear, thirds
from polymix.convert.weights import LoadedWeights, load_weights
from polymix.mixers.inheritance import Projection

__all__ = [
    "Adapter", "AttentionSpec", "ConversionReport", "EquivalentMixer", "Host", "InsertionReport", "LayerReport",
    "LoadedWeights", "Projection", "attention_layers", "convert", "insert", "linear", "load_pretrained", "load_weights",
    "register_adapter", "save_pretrained", "thirds",
]  # fmt: skip
