"""Layers that cannot be converted, whatever the mixer: their weights are not numbers here, or they are used twice."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import adapter_for
from polymix.errors import CapabilityError

QUANTISED = ("bitsandbytes", "gguf", "torchao", "awq", "gptqmodel", "auto_gptq", "hqq", "quanto", "aqlm", "eetq",
             "fbgemm", "compressed_tensors", "finegrained_fp8", "bitnet", "vptq", "spqr", "higgs")  # fmt: skip
_DEQUANTISE = "Load the model without quantization, or call model.dequantize(); convert it, and quantise it then."
_CONFIG = "Load the weights first: from_pretrained without device_map, or load_state_dict(…, assign=True)."
_SHARED = "Keep it, or give each place a copy of its own."


def check_readable(model: nn.Module, layers: Mapping[str, nn.Module]) -> None:
    """Raise CapabilityError for layers with quantised weights or none, and for layers that share a place in a cache.

    Weights may be missing (on meta) where nothing is read from a call: the mixers are then on meta too.
    """
    names: dict[int, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        names.setdefault(id(module), []).append(name)
    for name, layer in layers.items():
        where = f"{name or 'the model'} ({type(layer).__name__})"
        how = next(filter(None, map(quantised, layer.modules())), None)
        if how is not None:
            got = f"{where}, whose weights are quantised ({how})"
            raise CapabilityError("model", got, "attention with floating-point weights", _DEQUANTISE)
        kind = adapter_for(layer)
        if kind is not None and kind.needs_call and any(value.is_meta for value in layer.parameters()):
            raise CapabilityError("model", f"{where}, whose weights are on meta", "a model with weights", _CONFIG)
        places, index = names[id(layer)], getattr(layer, "layer_idx", None)
        if len(places) > 1 and type(index) is int and index >= 0:
            got = f"{where}, which is {places[1]} too, with one place in the cache, {index}"
            raise CapabilityError("model", got, "a layer for every place in the cache", _SHARED)


def quantised(module: nn.Module) -> str | None:
    """How the weights of a module are quantised; None where they are floating-point numbers."""
    kinds: list[Any] = [type(module)]
    for value in (*module._parameters.values(), *module._buffers.values()):
        if value is not None and type(value) not in (Tensor, nn.Parameter):
            kinds.append(type(value))
    for kind in kinds:
        family = kind.__module__.startswith(("transformers.models.", "diffusers.models."))  # one is named BitNet
        if not family and any(word in part.lower() for part in kind.__module__.split(".") for word in QUANTISED):
            return f"{kind.__module__.partition('.')[0]}: {kind.__name__}"
        if kind.__module__.startswith(("torch.ao.nn.quantized", "torch.nn.quantized")):
            return kind.__name__
    integer = next((value for value in module._parameters.values() if value is not None and _integer(value)), None)
    return None if integer is None else f"{type(module).__name__} of {str(integer.dtype).removeprefix('torch.')}"


def _integer(value: Tensor) -> bool:
    """Whether a weight holds codes: integers, or numbers of 8 bits, which are scaled elsewhere."""
    return (not value.is_floating_point() and not value.is_complex()) or value.element_size() == 1
