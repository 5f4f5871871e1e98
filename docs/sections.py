"""An extension of griffe, which reads docstrings for the API page: sections need no blank line between them."""

from __future__ import annotations

import re
from typing import Any

import griffe


class Sections(griffe.Extension):
    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring:
            obj.docstring.value = re.sub(r"\n+(Args|Returns|Raises):\n", r"\n\n\1:\n", obj.docstring.value)
