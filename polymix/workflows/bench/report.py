"""report.html: tables and pictures of a benchmark in one file that needs nothing else."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined

from polymix.workflows.bench.plots import draw
from polymix.workflows.bench.table import label, machine, tabled, views
from polymix.workflows.results import write_atomically


def write_report(content: dict[str, Any], folder: Path) -> Path:
    """Draw the pictures and write the report of a benchmark into `folder`."""
    pictures = {
        path.name: "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
        for path in draw(content, folder)
    }
    tables = []
    for title, rows in views(content):
        headings, lines = tabled(rows)
        tables.append({"title": title, "headings": headings, "rows": lines})
    environment = Environment(
        loader=PackageLoader("polymix", "workflows/bench"), autoescape=True, undefined=StrictUndefined
    )
    html = environment.get_template("report.html.j2").render(
        tables=tables,
        pictures=pictures,
        ceilings=content["ceilings"],
        finished=content["finished"],
        settings=content["settings"],
        machine=machine(content),
        stopped=[{**row, "label": label(row)} for row in content["rows"] if row["stopped"]],
    )
    path = folder / "report.html"
    write_atomically(path, html)
    return path
