"""polymix compare."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import MaxGib, MaxSeconds, Resume, Threads, bars, cores, counts, print_table


def command(
    data: Annotated[
        str | None, typer.Option(help="Folder of images, one sub-folder a class. Default: the digits.")
    ] = None,
    mixers: Annotated[str | None, typer.Option(help="For example padre:degree=3,pom:degree=3:expand=1,qt.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json, the plots and report.html.")] = Path(
        "polymix-compare"
    ),
    image_size: Annotated[int | None, typer.Option(help="Pixels a side; 8 for the digits, 32 for --data.")] = None,
    patch_size: Annotated[int | None, typer.Option(help="Pixels a patch; 2 for the digits, 4 for --data.")] = None,
    epochs: Annotated[int, typer.Option(help="Training epochs of each run.")] = 30,
    seeds: Annotated[int, typer.Option(help="Training runs of each mixer.")] = 2,
    tokens: Annotated[str, typer.Option(help="Token counts to measure.")] = "64,256,1024,4096,16384",
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1, mps …")] = "cpu",
    threads: Threads = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_seconds: MaxSeconds = 10.0,
    max_gib: MaxGib = 4.0,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, few epochs, short sweep: about a minute.")] = False,
    resume: Resume = False,
) -> None:
    """Which mixer, how accurate, how fast, from how many tokens on: on your images and machine.

    Trains the same small vision transformer once for each mixer, measures every mixer over a sweep of token counts,
    and says in words which one to take and when to keep attention.

    Example: polymix compare --data photos --mixers padre:degree=3,pom:degree=3:expand=1 --out photos-report
    """
    from polymix.mixers.spec import DEFAULT
    from polymix.workflows.compare.run import compare as run
    from polymix.workflows.compare.settings import Settings

    settings = Settings(
        data=data, mixers=mixers or DEFAULT, image_size=image_size, patch_size=patch_size, epochs=epochs, seeds=seeds,
        tokens=counts(tokens), device=device, threads=threads or cores(), dtype=dtype, max_seconds=max_seconds,
        max_gib=max_gib,
    )  # fmt: skip
    settings = settings.quickened() if quick else settings
    console = Console()
    with bars(console, out) as progress:
        results = run(settings, out, progress, resume=resume)
    from polymix.workflows.compare.report import write_report
    from polymix.workflows.compare.table import terminal_table

    report = write_report(results.content, out)
    headings, rows = terminal_table(results.content)
    print_table(console, None, headings, rows)
    said = results.content["answer"]
    console.print(f"\n[bold]{said['headline']}[/bold]", highlight=False)
    for sentence in said["sentences"]:
        console.print(f"• {sentence}", highlight=False)
    for line in results.content["data"]["skipped"]:
        console.print(f"Skipped, unreadable: {line}", highlight=False)
    console.print(f"\nReport: {report}   Numbers: {out / 'results.json'}", highlight=False)
