"""report.html of a search, with the picture of its front."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import polymix
from polymix.convert.trained import PLAN
from polymix.files import write_whole
from polymix.numbers import machine_line
from polymix.pages import render
from polymix.pages.plots import Picture, publish
from polymix.workflows.search.answer import Search, front_rows, layer_rows, point_rows
from polymix.workflows.search.damage import KINDS
from polymix.workflows.search.plots import front


def write(answer: Search, folder: Path) -> None:
    """Write the page and front.png into the folder of a search."""
    content = answer.content
    alt = "Predicted damage against the share of attention's time, with the plans and fixed rules that were measured"
    shown = publish([Picture("front", alt, partial(front, content))], folder)
    page = render(
        "search/report.html.j2", content=content, pictures=shown, damage=KINDS[content["damage"]],
        points=point_rows(content), front=front_rows(content, 20), layers=layer_rows(content),
        machine=machine_line(content["machine"]), version=polymix.__version__, plan=folder / PLAN,
    )  # fmt: skip
    write_whole(folder / "report.html", page)
