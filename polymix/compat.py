"""Workarounds for broken installations of other libraries, applied only where they are needed."""

from __future__ import annotations

import importlib
import importlib.util
import sys

import torch

_library: torch.library.Library | None = None  # kept alive: the schemas are removed together with this object
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)


def cure_torchvision() -> bool:
    """Make a CUDA build of torchvision importable next to a CPU-only torch.

    Importing such a torchvision fails with "operator torchvision::nms does not exist". timm, transformers,
    torchmetrics and lightning import torchvision when it is installed, and fail with it. Registering the schemas of
    the two missing operators lets the import succeed; the operators themselves still cannot be called.

    Returns:
        True if the workaround was applied; False if torchvision is missing or works.
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
