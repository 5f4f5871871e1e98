"""polymix predict."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import AsJson, Threads, print_json, thread_count


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run of polymix train.")],
    files: Annotated[list[str], typer.Argument(help="Files to predict, of the kind that the domain reads.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures and predictions.json.")] = Path("polymix-predict"),
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option of the use, such as beam=50. Repeatable.")
    ] = None,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda.")] = "cpu",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Apply a trained model to files: annotated pictures, and the results as JSON.

    Example: polymix predict fields-pom pastis/DATA_S2/S2_10000.npy --out seen
    """
    import torch

    from polymix._io import check_device
    from polymix.tasks.saved import SavedRun

    check_device(device, "--device")
    torch.set_num_threads(thread_count(threads))
    console = Console(stderr=as_json)
    rows = (
        SavedRun.of(folder)
        .changed(set_ or ())
        .predict(
            files,
            out,
            device=device,
            say=lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True),
        )
    )
    if as_json:
        print_json(rows)
        return
    for row in rows:
        shown = {name: value for name, value in row.items() if name != "file" and isinstance(value, (str, int, float))}
        text = "  ".join(f"{name} {value}" for name, value in shown.items())
        console.print(f"{row['file']}: {text}", markup=False, highlight=False, soft_wrap=True)
