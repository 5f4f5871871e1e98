"""An extension of griffe, which reads the docstrings for the API page: a section needs no blank line before it."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"\n+(Args|Returns|Raises):\n", r"\n\n\1:\n", obj.docstring.value)
