"""polymix compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import (
    DATA_NAMES,
    MaxGib,
    MaxSeconds,
    Resume,
    Threads,
    bars,
    check_paths,
    check_report,
    counts,
    print_table,
    thread_count,
)


def command(
    data: Annotated[
        str | None,
        typer.Option(
            help="Folder of images with one sub-folder per class, or of idx files; fashion-mnist; or digits (default: "
            "scenes of digits)."
        ),
    ] = None,
    mixers: Annotated[str | None, typer.Option(help="Mixers, for example padre:degree=3,pom:expand=1,qt.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json, the pictures and report.html.")] = Path(
        "polymix-compare"
    ),
    image_size: Annotated[
        int | None,
        typer.Option(help="Pixels per side (default: scenes 16, digits 8, fashion-mnist 28, folder 32)."),
    ] = None,
    patch_size: Annotated[
        int | None, typer.Option(help="Pixels per side of a patch (default: digits 2, otherwise 4).")
    ] = None,
    epochs: Annotated[
        float | None,
        typer.Option(
            help="Epochs of each run (default: scenes 9, fashion-mnist 1, otherwise 30; --quick: 2, 0.2 or 8)."
        ),
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Training runs per mixer (default: 2; --quick: 1).")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(
            help="Numbers of tokens at which to time mixers (default: 64,256,1024,4096,16384; --quick: up to 1024; "
            "with --task: none)."
        ),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …")] = "cpu",
    threads: Threads = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_seconds: MaxSeconds = 10.0,
    max_gib: MaxGib = 4.0,
    quick: Annotated[
        bool,
        typer.Option("--quick", help="Fewer seeds, epochs and tokens: about a minute."),
    ] = False,
    task: Annotated[
        str, typer.Option(help="A domain such as satellite, or a recipe's file: train every mixer on it.")
    ] = "classify",
    layout: Annotated[str | None, typer.Option(help="How the files of --data are arranged.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="Sizes and schedule of the domain by name, such as tiny or paper.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="An option of the domain's recipe: --set steps=200. Repeatable.")
    ] = None,
    resume: Resume = False,
) -> None:
    """Which mixer is best on your data and machine, and from which length on?

    Trains the same model with each mixer: a small vision transformer on images, or a domain's own with --task. Times
    every mixer over a range of token counts, and says which one to use and when to keep attention.

    Example: polymix compare --data photos --mixers padre:degree=3,pom:degree=3:expand=1 --out photos-report
    """
    check_report()
    check_paths("--data", data, names=DATA_NAMES)
    from functools import partial

    from polymix.workflows.compare import report, run, tables
    from polymix.workflows.compare.settings import Settings

    settings = Settings(
        task=task, data=data, layout=layout, preset=preset, options=tuple(set_ or ()), mixers=mixers,
        image_size=image_size, patch_size=patch_size, epochs=epochs, seeds=seeds, device=device,
        threads=thread_count(threads), dtype=dtype, tokens=None if tokens is None else counts(tokens),
        max_seconds=max_seconds, max_gib=max_gib, quick=quick,
    )  # fmt: skip
    console = Console()
    say = partial(console.print, markup=False, highlight=False)
    with bars(console, out) as progress:
        content = run.compare(settings, out, progress, resume=resume).content
    page = report.write_report(content, out)
    headings, rows = tables.terminal_table(content)
    print_table(console, None, headings, rows)
    if content["data"] is not None:
        say(tables.data_line(content["data"]))
    for row in content["refused"]:
        say(f"Left out: {row['mixer']}. {row['reason']}")
    if content["answer"] is not None:
        console.print(f"\n[bold]{content['answer']['headline']}[/bold]", highlight=False)
        for sentence in content["answer"]["sentences"]:
            say(f"• {sentence}")
    elif content["control"]:
        say(content["control"])
    for line in content["data"]["skipped"] if content["data"] is not None else ():
        say(f"Skipped an unreadable image: {line}")
    console.print(f"\nReport: {page}   Numbers: {out / 'results.json'}", highlight=False)
