"""polymix bench."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import (
    MaxGib,
    MaxSeconds,
    Resume,
    bars,
    check_report,
    counts,
    print_table,
    thread_count,
    words,
)


def command(
    context: typer.Context,
    mixers: Annotated[str, typer.Option(help="Mixers, for example padre:degree=3,pom:degree=3:expand=1,qt.")] = (
        "padre-2,padre-3,pom,qt,poly_sa,poly_nl,softmax"
    ),
    tokens: Annotated[str, typer.Option(help="Numbers of tokens.")] = "256,1024,4096,16384",
    dims: Annotated[str, typer.Option(help="Numbers of channels.")] = "192",
    batch: Annotated[str, typer.Option(help="Batch sizes.")] = "1",
    dtypes: Annotated[str, typer.Option(help="Types: float32, bfloat16, float16.")] = "float32",
    passes: Annotated[str, typer.Option(help="Passes: forward, folded, training, step.")] = "forward,training",
    impls: Annotated[str, typer.Option(help="Implementations: auto, eager, or a kernel's name.")] = "auto",
    threads: Annotated[
        str | None, typer.Option(help="Numbers of CPU threads (default: OMP_NUM_THREADS, or one per core).")
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Time for all rounds of one call.")] = 0.4,
    max_seconds: MaxSeconds = 10.0,
    max_gib: MaxGib = 4.0,
    out: Annotated[Path, typer.Option(help="Folder for results.json, the pictures and report.html.")] = Path(
        "polymix-bench"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Up to 1,024 tokens, few rounds: half a minute.")] = False,
    resume: Resume = False,
    parallel: Annotated[
        int | None,
        typer.Option(
            help="Share each sequence among so many processes: time and bytes of a layer, beside one process."
        ),
    ] = None,
    compare: Annotated[
        tuple[Path, Path] | None,
        typer.Option(help="Measure nothing; show what changed between two folders."),
    ] = None,
    noise: Annotated[float, typer.Option(help="With --compare: ignore smaller changes of a median.")] = 0.05,
) -> None:
    """What do the mixers cost on this machine?

    Measures time, memory and shares of the machine's ceilings, compared with each mixer's floor and with attention.
    Options take several values, separated by commas.

    --compare A B, two folders or results.json files, shows what got faster or slower beyond the noise. Its exit status
    is 1 on a regression.

    Example: polymix bench --tokens 1024,4096 --dtypes float32,bfloat16 --out my-bench
    """
    if compare is not None:
        return _compare(*compare, noise)
    if parallel is not None:
        _check_parallel(context)
        return _parallel(parallel, mixers, tokens, dims, batch, seconds, max_seconds, max_gib, out)
    check_report()
    from polymix.mixers.spec import parse_mixers
    from polymix.workflows.bench.report import write_report
    from polymix.workflows.bench.run import Settings, bench
    from polymix.workflows.bench.tables import not_measured, table, views

    settings = Settings(
        mixers=mixers, tokens=counts(tokens), dims=counts(dims, "--dims", "192,384"),
        batch=counts(batch, "--batch", "1,16"), dtypes=words(dtypes), passes=words(passes), impls=words(impls),
        threads=tuple(map(thread_count, (None,) if threads is None else counts(threads, "--threads", "1,2"))),
        device=device, seconds=seconds,
        max_seconds=max_seconds, max_gib=max_gib,
    )  # fmt: skip
    settings = settings.as_quick() if quick else settings
    console = Console(highlight=False)
    with bars(console, out) as progress:
        results = bench(settings, parse_mixers(mixers), out, progress, resume=resume)
    report = write_report(results.content, out)
    for title, rows in views(results.content):
        print_table(console, title, *table(rows, narrow=True))
    for line in not_measured(results.content):
        console.print(f"Not measured: {line}", markup=False)
    console.print(f"\nReport: {report}   Numbers: {out / 'results.json'}")
    return None


def _check_parallel(context: typer.Context) -> None:
    from polymix.errors import OptionError

    names = ("dtypes", "passes", "impls", "threads", "device", "quick", "resume")
    sources = {name: context.get_parameter_source(name) for name in names}  # an enumeration that typer keeps to itself
    if given := [f"--{name}" for name, source in sources.items() if source and source.name == "COMMANDLINE"]:
        allowed = "forward and backward in float32, one CPU thread a process, measured anew"
        raise OptionError("--parallel", f"with {', '.join(given)}", allowed, "Leave the others out.")


def _parallel(
    processes: int, mixers: str, tokens: str, dims: str, batch: str, seconds: float, max_seconds: float,
    max_gib: float, out: Path,
) -> None:  # fmt: skip
    from polymix.errors import OptionError
    from polymix.mixers.spec import parse_mixers
    from polymix.workflows.bench.parallel import HEADINGS, ParallelSettings, bench_parallel, table

    sizes = {name: counts(value, name, "192") for name, value in (("--dims", dims), ("--batch", batch))}
    for name, values in sizes.items():
        if len(values) != 1:
            raise OptionError(name, values, "one value with --parallel", "Choose one.")
    settings = ParallelSettings(
        mixers, processes, tuple(counts(tokens)), dim=sizes["--dims"][0], batch=sizes["--batch"][0], seconds=seconds,
        max_seconds=max_seconds, max_gib=max_gib,
    )  # fmt: skip
    console = Console(highlight=False)
    with bars(console, out) as progress:
        results = bench_parallel(settings, parse_mixers(mixers), out, progress)
    print_table(console, f"A layer, forward and backward, on {processes} processes", HEADINGS,
                table(results.content["rows"]))  # fmt: skip
    for row in results.content["rows"]:
        if row["stopped"]:
            console.print(f"Not measured: {row['mixer']}, {row['way']}: {row['stopped']}", markup=False)
    console.print(f"\nNumbers: {out / 'results.json'}")


def _compare(a: Path, b: Path, noise: float) -> None:
    from polymix.results import RESULTS
    from polymix.workflows.bench.changes import HEADINGS, REGRESSIONS, comparability_warnings, compare
    from polymix.workflows.bench.run import Results

    before, after = (Results.load(path / RESULTS if path.is_dir() else path) for path in (a, b))
    changes = compare(before, after, noise)
    console = Console(highlight=False)
    for warning in comparability_warnings(before, after, noise):
        console.print(f"[bold]Warning:[/bold] {warning}")
    if changed := [change.cells() for change in changes if change.verdict != "same"]:
        print_table(console, f"A: {a}   B: {b}", HEADINGS, changed)
    verdicts = Counter(change.verdict for change in changes)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in verdicts.items()))
    if any(change.verdict in REGRESSIONS for change in changes):
        raise typer.Exit(1)
