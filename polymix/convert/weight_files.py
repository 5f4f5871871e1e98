"""The package that reads and writes weights."""

from __future__ import annotations

from typing import Any

from polymix.extras import needs


def load_safetensors() -> Any:
    """The safetensors package. Raises MissingExtraError where it is not installed."""
    with needs():
        import safetensors.torch
    return safetensors
