"""polymix show."""

from __future__ import annotations

import math
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from polymix.cli.shared import cores


def command(
    name: Annotated[str, typer.Argument(help="A mixer, such as padre.")],
    options: Annotated[list[str] | None, typer.Argument(help="dim=192, n=4096, and options such as degree=3.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for the floor (default: one per core).")] = None,
) -> None:
    """Show what a mixer costs: parameters, multiply-adds, bytes, the floor on this machine, and the paper's figures.

    Example: polymix show padre degree=3 dim=192 grid=64x64
    """
    import torch

    from polymix._io import parse_options
    from polymix.measure import floor, interleaved
    from polymix.mixers import create_mixer
    from polymix.workflows.papers import printed

    chosen = parse_options(options or [])
    dim, n = chosen.pop("dim", 192), chosen.pop("n", None)
    mixer = create_mixer(name, dim, **chosen)
    if n is None:
        grid = mixer.config.built_grid
        n = math.prod(grid) + mixer.config.prefix if grid else 4096
    torch.set_num_threads(threads or cores())
    cost = mixer.cost(n)
    seconds = interleaved({"floor": floor(cost)}, seconds=0.5)["floor"].median
    table = Table("", "polymix", "in the paper", title=f"{mixer.name}, {dim} channels, {n:,} tokens")
    figures = printed(mixer, n)
    lines: list[tuple[str, str, str]] = [
        ("parameters", f"{cost.parameters:,}", "parameters"),
        ("multiply-adds", f"{cost.multiply_adds / 1e9:.3f} G", "multiplications"),
        ("FLOPs (2 per multiply-add)", f"{cost.flops / 1e9:.3f} G", "FLOPs"),
        ("bytes moved, float32", f"{cost.bytes / 2**20:.1f} MiB", "bytes"),
        (f"floor, {torch.get_num_threads()} threads", f"{seconds * 1e3:.3f} ms", "latency"),
    ]
    notes = []
    for label, value, quantity in lines:
        here = [figure for figure in figures if figure.quantity == quantity]
        table.add_row(label, value, ", ".join(figure.value for figure in here))
        notes += here
    for figure in figures:
        if figure not in notes:
            table.add_row(figure.quantity, "", figure.value)
    console = Console()
    console.print(table)
    for figure in figures:
        console.print(f"{figure.value}: {figure.source}{'; ' + figure.note if figure.note else ''}", highlight=False)
