"""The progress bars of transformers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from polymix.convert.libraries.base import load_library


@contextmanager
def no_bars() -> Iterator[None]:
    """None while models are read and written; afterwards as the user had them."""
    logging: Any = load_library("transformers").utils.logging
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
