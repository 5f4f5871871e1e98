"""Report pages: one HTML file that needs no other, and other texts made from templates.

The templates lie beside the code that fills them; pages extend pages/page.html.j2. Pages follow the reader's light or
dark mode, fit a phone, and print with all columns of their tables.
"""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

from polymix.extras import needs
from polymix.numbers import figure, fixed, plural

# Every colour of pages and pictures in light mode, with its counterpart in dark mode.
# Not quite black: matplotlib leaves plain black out of its SVG files, and it could not be replaced.
COLOURS = {
    "ink": ("#1c1c1c", "#e8e8e8"), "paper": ("#ffffff", "#16181c"), "muted": ("#555555", "#b4b7bd"),
    "line": ("#e4e4e4", "#3b3f46"), "attention": ("#000001", "#ffffff"), "floor": ("#767676", "#9a9da3"),
    "front": ("#bbbbbb", "#6c7078"), "accent": ("#0072b2", "#4aa8e0"), "c1": ("#d55e00", "#ff8a3d"),
    "c2": ("#009e73", "#2cc79c"), "c3": ("#cc79a7", "#e8a0c8"), "c4": ("#e69f00", "#f5bd3d"),
    "c5": ("#56b4e9", "#8fd0f7"), "c6": ("#7a3db8", "#b98af0"), "c7": ("#8c510a", "#cf9a55"),
    "c8": ("#5b7f00", "#a3c94a"), "c9": ("#c2185b", "#ff6f9f"),
}  # fmt: skip


@cache
def _environment() -> Any:
    with needs("train", "Pages are made with it."):
        from jinja2 import Environment, FileSystemLoader, StrictUndefined

    package = Path(__file__).parents[1]
    environment = Environment(
        loader=FileSystemLoader([package / "workflows", package]), undefined=StrictUndefined, trim_blocks=True,
        lstrip_blocks=True, autoescape=lambda name: name is not None and "html" in name,
    )  # fmt: skip
    environment.globals["colours"] = COLOURS
    environment.filters |= {"figure": figure, "fixed": fixed, "plural": plural, "markdown": markdown, "fenced": fenced}
    return environment


def render(template: str, **names: Any) -> str:
    """The text of a template such as "bench/report.html.j2", named by its path in workflows/ or the package."""
    return _environment().get_template(template).render(**names)


def markdown(text: Any) -> str:
    """A text of the user's, such as a file's name, as one line of Markdown that shows it and does nothing else.

    No HTML, heading, link, picture or cell of a table can begin in it.
    """
    line = " ".join(str(text).split())
    escaped = re.sub(r"([\\`*\[\]|])", r"\\\1", html.escape(line, quote=False))
    return f"\\{escaped}" if escaped[:1] in ("#", "-", "+") else escaped


def table_line(cells: Iterable[Any]) -> str:
    """A line of a table in Markdown."""
    return f"| {' | '.join(map(markdown, cells))} |"


def fenced(text: str, language: str = "") -> str:
    """Code or a sample as a block of Markdown that it cannot end."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def embedded(pictures: Iterable[Path]) -> dict[str, str]:
    """PNG files by name, as data URLs for a page's `src` attributes."""
    return {path.name: data_url(path.read_bytes()) for path in pictures}


def data_url(png: bytes) -> str:
    """The bytes of a PNG file as a URL."""
    return "data:image/png;base64," + base64.b64encode(png).decode()
