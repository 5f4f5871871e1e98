"""polymix predict."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polymix.cli.shared import AsJson, Threads, check_paths, print_json, thread_count


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a run of polymix train.")],
    files: Annotated[list[str], typer.Argument(help="Files to predict, of the kind that the domain reads.")],
    out: Annotated[Path, typer.Option(help="Folder for the pictures and predictions.json.")] = Path("polymix-predict"),
    threshold: Annotated[
        float | None, typer.Option(help="Lowest score of an object that is drawn. Default: as in training, 0.3.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option of the use, such as beam=50. Repeatable.")
    ] = None,
    sequence_parallel: Annotated[
        int, typer.Option(help="Processes that share each sequence: all that torchrun has started.")
    ] = 1,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda.")] = "cpu",
    threads: Threads = None,
    as_json: AsJson = False,
) -> None:
    """Apply a trained model to files: annotated pictures, and the results as JSON.

    Example: polymix predict fields-pom pastis/DATA_S2/S2_10000.npy --out seen
    """
    check_paths("folder", folder)
    check_paths("files", *files)
    import torch

    from polymix.devices import check_device, processes
    from polymix.train.saved import SavedRun

    check_device(device, "--device")
    torch.set_num_threads(thread_count(threads))
    console = Console(stderr=as_json)
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    words = [*(set_ or ()), *([] if threshold is None else [f"threshold={threshold}"])]
    rows = (
        SavedRun.of(folder)
        .changed(words)
        .predict(files, out, device=device, say=say, sequence_parallel=sequence_parallel)
    )
    if processes()[0]:
        return  # the first process says what all have found
    if as_json:
        print_json(rows)
        return
    for row in rows:
        values = {name: value for name, value in row.items() if isinstance(value, (str, int, float))}
        parts: list[Any] = [values.pop("answer")] if "answer" in values else []
        parts += [f"{name} {value}" for name, value in values.items() if name != "file"]
        say(f"{row['file']}: {'  '.join(map(str, parts))}")
