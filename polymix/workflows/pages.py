"""HTML pages that need no other file, and other texts made from templates in workflows/."""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("polymix", "workflows"), undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True,
        autoescape=lambda name: name is not None and "html" in name,
    )  # fmt: skip


def render(template: str, **names: Any) -> str:
    """The text of a template such as "bench/report.html.j2". Pages extend "page.html.j2"."""
    return _environment().get_template(template).render(**names)


def embedded(pictures: Iterable[Path]) -> dict[str, str]:
    """PNG files by name, as data URLs for a page's `src` attributes."""
    return {path.name: "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in pictures}
