"""Report pages: one HTML file that needs no other, and other texts made from templates.

The templates lie beside the code that fills them; pages extend pages/page.html.j2.
"""

from __future__ import annotations

import base64
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined


@cache
def _environment() -> Environment:
    package = Path(__file__).parents[1]
    return Environment(
        loader=FileSystemLoader([package / "workflows", package]), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, autoescape=lambda name: name is not None and "html" in name,
    )  # fmt: skip


def render(template: str, **names: Any) -> str:
    """The text of a template such as "bench/report.html.j2", named by its path in workflows/ or the package."""
    return _environment().get_template(template).render(**names)


def embedded(pictures: Iterable[Path]) -> dict[str, str]:
    """PNG files by name, as data URLs for a page's `src` attributes."""
    return {path.name: "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode() for path in pictures}
