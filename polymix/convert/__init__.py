"""A model with attention in, a model with mixers out."""

from polymix.convert.adapter import Adapter, Host, register_adapter
from polymix.convert.attention import Attention, Projection, linear, thirds
from polymix.convert.insert import InsertionReport, insert
from polymix.convert.report import ConversionReport, LayerReport
from polymix.convert.save import load_pretrained, save_pretrained
from polymix.convert.swap import attention_layers, convert

__all__ = [
    "Adapter", "Attention", "ConversionReport", "Host", "InsertionReport", "LayerReport", "Projection",
    "attention_layers", "convert", "insert", "linear", "load_pretrained", "register_adapter", "save_pretrained",
    "thirds",
]  # fmt: skip
