"""An exported ONNX file in place of the PyTorch model that it came from, to measure it as that model is measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from polymix.errors import CapabilityError
from polymix.export.manifest import Arrays, onnx_session, run_session


def substitute(model: nn.Module, path: Path) -> nn.Module:
    """Let `model` run the file at `path`, with ONNX Runtime on the CPU; returns the model, which keeps its weights.

    Inputs go to the file's inputs by place or by name. Outputs come back as `polymix.export.graph.outputs_of` found
    them: a tensor, a tuple or a dict. A file for a fixed batch is called for each part of a larger one.

    Raises, when called: CapabilityError: the file has other inputs than the call.
    """
    session = onnx_session(path)
    names = [part.name for part in session.get_inputs()]
    fixed = {part.name: part.shape[0] for part in session.get_inputs() if part.shape and isinstance(part.shape[0], int)}
    size = next(iter(fixed.values()), 0)

    def forward(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(names, args, strict=False)), **kwargs}
        arrays = {name: value.detach().cpu().numpy() for name, value in arguments.items() if isinstance(value, Tensor)}
        if set(arrays) != set(names) or len(arrays) != len(args) + len(kwargs):
            got, expected = ", ".join(arguments) or "none", ", ".join(names)
            raise CapabilityError("file", f"a call with {got}", f"a call with {expected}", "Measure it from Python.")
        total = len(next(iter(arrays.values())))
        if not size or size == total:
            return _structured(run_session(session, arrays))
        parts = [run_session(session, _part(arrays, start, size)) for start in range(0, total, size)]
        return _structured({name: np.concatenate([part[name] for part in parts])[:total] for name in parts[0]})

    model.forward = forward
    return model


def _part(arrays: Arrays, start: int, size: int) -> Arrays:
    """Samples from `start` on, `size` of them: the last one repeated where there are fewer."""
    return {name: array[np.minimum(np.arange(start, start + size), len(array) - 1)] for name, array in arrays.items()}


def _structured(outputs: Arrays) -> Any:
    tensors = {name: torch.from_numpy(array) for name, array in outputs.items()}
    if list(tensors) == ["output"]:
        return tensors["output"]
    if list(tensors) == [f"output_{place}" for place in range(len(tensors))]:
        return tuple(tensors.values())
    return tensors
