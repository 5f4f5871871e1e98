"""polymix compare."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from polymix.cli.shared import MaxGib, MaxSeconds, Resume, Threads, bars, counts, print_table, thread_count
from polymix.errors import OptionError


def command(
    data: Annotated[
        str | None,
        typer.Option(help="Folder of images with one sub-folder per class, or digits (default: scenes of digits)."),
    ] = None,
    mixers: Annotated[str | None, typer.Option(help="Mixers, for example padre:degree=3,pom:expand=1,qt.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for results.json, the pictures and report.html.")] = Path(
        "polymix-compare"
    ),
    image_size: Annotated[
        int | None, typer.Option(help="Pixels per side (default: scenes 16, digits 8, folder 32).")
    ] = None,
    patch_size: Annotated[
        int | None, typer.Option(help="Pixels per side of a patch (default: digits 2, otherwise 4).")
    ] = None,
    epochs: Annotated[
        int | None, typer.Option(help="Epochs of each training run (default: scenes 6, otherwise 30; --quick: 2 or 8).")
    ] = None,
    seeds: Annotated[int | None, typer.Option(help="Training runs per mixer (default: 2; --quick: 1).")] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Numbers of tokens to measure (default: 64,256,1024,4096,16384; --quick: up to 1024)."),
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
        str | None, typer.Option(help="A domain such as fields, or a recipe's file: train every mixer on it.")
    ] = None,
    layout: Annotated[str | None, typer.Option(help="With --task: how --data is arranged.")] = None,
    preset: Annotated[
        str | None, typer.Option(help="With --task: sizes and schedule by name, such as tiny or paper.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="With --task: an option of its recipe: --set steps=200.")
    ] = None,
    resume: Resume = False,
) -> None:
    """Which mixer is best on your images and machine, and from which length on?

    Trains the same small vision transformer with each mixer, measures every mixer over a range of token counts, and
    says which one to use and when to keep attention.

    Example: polymix compare --data photos --mixers padre:degree=3,pom:degree=3:expand=1 --out photos-report
    """
    if task is not None:
        given = {"--image-size": image_size, "--patch-size": patch_size, "--epochs": epochs, "--tokens": tokens}
        _domain(
            task, data, layout, preset, set_ or (), mixers, seeds or (1 if quick else 2), out, threads, resume, given
        )
        return
    for name, value in (("--layout", layout), ("--preset", preset), ("--set", set_)):
        if value:
            raise OptionError(name, value, f"--task with {name}", "Name the domain.")
    from polymix.mixers.spec import DEFAULT
    from polymix.workflows.compare.report import write_report
    from polymix.workflows.compare.run import Settings, compare
    from polymix.workflows.compare.tables import data_line, terminal_table

    settings = Settings(
        data=data, mixers=DEFAULT if mixers is None else mixers, image_size=image_size, patch_size=patch_size,
        device=device, threads=thread_count(threads), dtype=dtype, max_seconds=max_seconds, max_gib=max_gib,
    )  # fmt: skip
    settings = settings.as_quick() if quick else settings
    chosen: dict[str, Any] = {"epochs": epochs, "seeds": seeds, "tokens": None if tokens is None else counts(tokens)}
    settings = replace(settings, **{name: value for name, value in chosen.items() if value is not None})
    console = Console()
    with bars(console, out) as progress:
        results = compare(settings, out, progress, resume=resume)
    report = write_report(results.content, out)
    headings, rows = terminal_table(results.content)
    print_table(console, None, headings, rows)
    answer, used = results.content["answer"], results.content["data"]
    console.print(data_line(used), highlight=False)
    console.print(f"\n[bold]{answer['headline']}[/bold]", highlight=False)
    for sentence in answer["sentences"]:
        console.print(f"• {sentence}", highlight=False)
    for line in results.content["data"]["skipped"]:
        console.print(f"Skipped an unreadable image: {line}", highlight=False)
    console.print(f"\nReport: {report}   Numbers: {out / 'results.json'}", highlight=False)


def _domain(
    task: str, data: str | None, layout: str | None, preset: str | None, options: Sequence[str], mixers: str | None,
    seeds: int, out: Path, threads: int | None, resume: bool, given: Mapping[str, Any],
) -> None:  # fmt: skip
    """The comparison on a domain, and its table."""
    from functools import partial

    from polymix.workflows.compare.domain import MIXERS, DomainSettings, compare_domain, table

    for name, value in given.items():
        if value is not None:
            raise OptionError(name, value, f"no {name} with --task", "Use --set for the options of its recipe.")
    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    settings = DomainSettings(
        task, data, layout, preset, tuple(options), mixers or MIXERS, seeds, thread_count(threads)
    )
    with bars(console, out):
        results = compare_domain(settings, out, say, resume=resume)
    head, *rows = table(results.content["rows"])
    print_table(console, None, head[:-1], [row[:-1] for row in rows])
    for row in results.content["refused"]:
        say(f"Left out: {row['mixer']}. {row['reason']}")
    say(results.content["control"] or "")
    say(f"Report: {out / 'report.html'}   Numbers: {out / 'results.json'}")
