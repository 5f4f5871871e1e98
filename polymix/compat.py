"""Cures for what surrounds us, applied only where they are needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

_library: torch.library.Library | None = None  # schemas live as long as the object that registered them
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def cure_torchvision() -> bool:
    """Make a torchvision that was built for CUDA importable beside a CPU-only torch; True if it was ill.

    Such a torchvision fails with "operator torchvision::nms does not exist", and takes timm, transformers, torchmetrics
    and lightning, which import it when it is there, down with it. Registering the schemas of the two operators that its
    binaries lack lets the import through; the operators themselves still cannot be called. A torchvision that is
    missing, or well, is left alone.
    """
    global _library
    if importlib.util.find_spec("torchvision") is None:
        return False
    try:
        importlib.import_module("torchvision")
        return False
    except RuntimeError as error:
        if "torchvision::" not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    _library = torch.library.Library("torchvision", "FRAGMENT")
    for schema in _SCHEMAS:
        _library.define(schema)
    importlib.import_module("torchvision")
    return True
