"""report.html: the answer first, then the tables and the pictures, in one file that needs nothing else."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from polymix.workflows.compare.plots import draw
from polymix.workflows.compare.results import write_atomically
from polymix.workflows.compare.table import headings, rows


def write_report(content: dict[str, Any], folder: Path) -> Path:
    """Draw the pictures and write the report of a finished comparison into `folder`."""
    pictures = {
        path.name: "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
        for path in draw(content, folder)
    }
    environment = Environment(
        loader=PackageLoader("polymix", "workflows/compare"), autoescape=True, undefined=StrictUndefined
    )
    html = environment.get_template("report.html.j2").render(
        **{key: content[key] for key in ("answer", "data", "host", "settings", "machine")},
        headings=headings(content),
        rows=rows(content),
        pictures=pictures,
        stopped=[row for row in content["sweep"] if row["stopped"]],
    )
    path = folder / "report.html"
    write_atomically(path, html)
    return path
