"""torchvision, which is imported in one place and only where it is needed: it takes a second of every start."""

from __future__ import annotations

import importlib
from typing import Any

from polymix.compat import cure_torchvision
from polymix.extras import needs


def torchvision(module: str) -> Any:
    """A module of torchvision by its name, such as "ops", also where a CUDA build of it lies beside a CPU torch.

    Raises MissingExtraError without torchvision.
    """
    cure_torchvision()
    with needs("detection"):
        return importlib.import_module(f"torchvision.{module}")
