"""A model with attention in, a model with mixers out."""

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.attention import Attention, linear, thirds
from polymix.convert.convert import attention_layers, convert
from polymix.convert.insert import InsertionReport, insert
from polymix.convert.report import ConversionReport, LayerReport
from polymix.convert.saving import load_pretrained, save_pretrained
from polymix.mixers.inheritance import Projection

__all__ = [
    "Adapter", "Attention", "ConversionReport", "Host", "InsertionReport", "LayerReport", "Projection",
    "attention_layers", "convert", "insert", "linear", "load_pretrained", "register_adapter", "save_pretrained",
    "thirds",
]  # fmt: skip
