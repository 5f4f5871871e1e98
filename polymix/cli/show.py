"""polymix show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import AsJson, Threads, print_json, print_table, thread_count


def command(
    name: Annotated[str, typer.Argument(help="A mixer, such as padre.")],
    options: Annotated[list[str] | None, typer.Argument(help="dim=192, n=4096, and options such as degree=3.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Show what a mixer costs on this machine and in its paper, what it can do, and its options.

    Example: polymix show padre degree=3 dim=192 grid=64x64
    """
    import torch

    from polymix.workflows.show import show

    torch.set_num_threads(thread_count(threads))
    costs = show(name, options or [])
    if as_json:
        print_json(asdict(costs))
        return
    console = Console(highlight=False)
    print_table(console, costs.title, ("", "polymix", "in the paper"), costs.rows)
    for source in costs.sources:
        console.print(source, markup=False)
    console.print("Options: " + ", ".join(f"{name}={value}" for name, value in costs.options.items()), markup=False)
