"""polymix show."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import AsJson, Threads, print_json, print_table, thread_count
from polymix.errors import OptionError


def command(
    name: Annotated[
        str, typer.Argument(help="A mixer, such as padre or padre-3; or a paper, such as PADRe, or a paper's host.")
    ],
    options: Annotated[list[str] | None, typer.Argument(help="dim=192, n=4096, and options such as degree=3.")] = None,
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Show a mixer's cost on this machine and in its paper, what it can do, and its options; or what a paper prints.

    Example: polymix show padre degree=3 dim=192 grid=64x64
    """
    import torch

    from polymix.train import published
    from polymix.workflows.show import show

    if entries := published.of(name):
        if options:
            raise OptionError("options", " ".join(options), f"none for {name}", "Name a mixer, such as padre.")
        if as_json:
            print_json([asdict(entry) for entry in entries])
        else:
            print("\n".join(published.lines(entries)))
        return
    torch.set_num_threads(thread_count(threads))
    costs = show(name, options or [])
    if as_json:
        print_json(asdict(costs))
        return
    console = Console(highlight=False)
    print_table(console, costs.title, ("", "polymix", "in the paper"), costs.rows)
    for source in costs.sources:
        console.print(source, markup=False)
    for line in costs.printed:
        console.print(line, markup=False)
    console.print("Options: " + ", ".join(f"{name}={value}" for name, value in costs.options.items()), markup=False)
