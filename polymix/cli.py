"""polymix <verb>: thin; each verb hands over to the package at once."""

from __future__ import annotations

import inspect
import json
import math
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from pathlib import Path
from typing import Annotated, Any

from polymix.errors import MissingExtraError, OptionError, PolymixError

try:
    import typer
    from rich import box
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
    from rich.table import Column, Table
except ImportError:  # main() says what to install
    typer = None  # type: ignore[assignment]


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Bars:
    """The progress of a comparison as rich bars."""

    def __init__(self, progress: Progress) -> None:
        self.progress = progress

    def start(self, what: str, total: int) -> Callable[[int], None]:
        self.progress.start()  # only now: a run that ends in an error before it begins shows none
        task = self.progress.add_task(what, total=total)
        return lambda done: self.progress.update(task, completed=done)


@contextmanager
def _bars(console: Console, out: Path) -> Iterator[Bars]:
    """Bars for a run that leaves its results in `out`; Ctrl-C says how to go on."""
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    progress = Progress(*shown, console=console)
    try:
        yield Bars(progress)
    except KeyboardInterrupt:
        console.print(
            f"Stopped. What had finished is kept in {out}: the same command with --resume goes on from there."
        )
        raise typer.Exit(130) from None
    finally:
        if progress.live.is_started:
            progress.stop()


def _counts(text: str, option: str = "--tokens", example: str = "64,256,1024") -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError as error:
        raise OptionError(option, repr(text), "whole numbers separated by commas", f"Try {example}.") from error


def _words(text: str) -> tuple[str, ...]:
    return tuple(part.strip() for part in text.split(","))


def compare(
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
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: one for each core.")] = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16.")] = "float32",
    max_seconds: Annotated[float, typer.Option(help="Stop a mixer at a length where one call takes longer.")] = 10.0,
    max_gib: Annotated[float, typer.Option(help="Stop a mixer at a length where one call holds more.")] = 4.0,
    quick: Annotated[bool, typer.Option("--quick", help="One seed, few epochs, short sweep: about a minute.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run in --out stopped.")] = False,
) -> None:
    """Which mixer, how accurate, how fast, from how many tokens on: on your images and machine.

    Trains the same small vision transformer once for each mixer, measures every mixer over a sweep of token counts,
    and says in words which one to take and when to keep attention.

    Example: polymix compare --data photos --mixers padre:degree=3,pom:degree=3:expand=1 --out photos-report
    """
    from polymix.compare.run import compare as run
    from polymix.compare.settings import Settings
    from polymix.compare.spec import DEFAULT

    settings = Settings(
        data=data, mixers=mixers or DEFAULT, image_size=image_size, patch_size=patch_size, epochs=epochs, seeds=seeds,
        tokens=_counts(tokens), device=device, threads=threads or _cores(), dtype=dtype, max_seconds=max_seconds,
        max_gib=max_gib,
    )  # fmt: skip
    settings = settings.quickened() if quick else settings
    console = Console()
    with _bars(console, out) as bars:
        results = run(settings, out, bars, resume=resume)
    from polymix.compare.report import write_report
    from polymix.compare.table import terminal_table

    report = write_report(results.content, out)
    headings, rows = terminal_table(results.content)
    _print_table(console, None, headings, rows)
    said = results.content["answer"]
    console.print(f"\n[bold]{said['headline']}[/bold]", highlight=False)
    for sentence in said["sentences"]:
        console.print(f"• {sentence}", highlight=False)
    for line in results.content["data"]["skipped"]:
        console.print(f"Skipped, unreadable: {line}", highlight=False)
    console.print(f"\nReport: {report}   Numbers: {out / 'results.json'}", highlight=False)


def bench(
    mixers: Annotated[str, typer.Option(help="For example padre:degree=3,pom:degree=3:expand=1,qt.")] = (
        "padre-2,padre-3,pom,qt,poly_sa,poly_nl,softmax"
    ),
    tokens: Annotated[str, typer.Option(help="Token counts.")] = "256,1024,4096,16384",
    dims: Annotated[str, typer.Option(help="Numbers of channels.")] = "192",
    batch: Annotated[str, typer.Option(help="Sequences in a call; more than one number by commas.")] = "1",
    dtypes: Annotated[str, typer.Option(help="Of float32, bfloat16, float16.")] = "float32",
    passes: Annotated[str, typer.Option(help="Of forward, folded, training, step.")] = "forward,training",
    impls: Annotated[str, typer.Option(help="auto, eager, or a kernel's name.")] = "auto",
    threads: Annotated[str | None, typer.Option(help="CPU threads; default: one for each core.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1 …")] = "cpu",
    seconds: Annotated[float, typer.Option(help="Time spent on all rounds of one call.")] = 0.4,
    max_seconds: Annotated[float, typer.Option(help="Stop a mixer at a length where one call takes longer.")] = 10.0,
    max_gib: Annotated[float, typer.Option(help="Stop a mixer at a length where one call holds more.")] = 4.0,
    out: Annotated[Path, typer.Option(help="Folder for results.json, the pictures and report.html.")] = Path(
        "polymix-bench"
    ),
    quick: Annotated[bool, typer.Option("--quick", help="Up to 1,024 tokens, few rounds: half a minute.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on where an interrupted run in --out stopped.")] = False,
    against: Annotated[
        tuple[Path, Path] | None, typer.Option("--compare", help="Measure nothing: what changed from A to B.")
    ] = None,
    noise: Annotated[float, typer.Option(help="With --compare: no smaller change of a median counts.")] = 0.05,
) -> None:
    """What the mixers cost here: time, memory, shares of this machine's ceilings, against their floor and attention.

    --compare A.json B.json tells what got faster or slower beyond the noise, and ends with status 1 on a regression.

    Example: polymix bench --tokens 1024,4096 --dtypes float32,bfloat16 --out my-bench
    """
    if against is not None:
        return _compare_benchmarks(*against, noise)
    from polymix.bench.run import bench as run
    from polymix.bench.settings import Settings
    from polymix.compare.spec import parse_mixers

    settings = Settings(
        mixers=mixers, tokens=_counts(tokens), dims=_counts(dims, "--dims", "192,384"),
        batch=_counts(batch, "--batch", "1,16"), dtypes=_words(dtypes), passes=_words(passes), impls=_words(impls),
        threads=_counts(threads, "--threads", "1,2") if threads else (_cores(),), device=device, seconds=seconds,
        max_seconds=max_seconds, max_gib=max_gib,
    )  # fmt: skip
    settings = settings.quickened() if quick else settings
    console = Console(highlight=False)
    with _bars(console, out) as bars:
        results = run(settings, parse_mixers(mixers), out, bars, resume=resume)
    from polymix.bench.report import write_report
    from polymix.bench.table import label, tabled, views

    report = write_report(results.content, out)
    for title, rows in views(results.content):
        _print_table(console, title, *tabled(rows, narrow=True))
    for row in results.content["rows"]:
        if row["stopped"]:
            console.print(
                f"Stopped: {label(row)}, {row['pass']}, {row['tokens']:,} tokens: {row['stopped']}", markup=False
            )
    console.print(f"\nReport: {report}   Numbers: {out / 'results.json'}")
    return None


def _compare_benchmarks(a: Path, b: Path, noise: float) -> None:
    from polymix.bench.compare import HEADINGS, REGRESSIONS, compare, warnings
    from polymix.bench.results import Results

    before, after = Results.load(a), Results.load(b)
    changes = compare(before, after, noise)
    console = Console(highlight=False)
    for warning in warnings(before, after, noise):
        console.print(f"[bold]Warning:[/bold] {warning}")
    if moved := [change.cells() for change in changes if change.verdict != "same"]:
        _print_table(console, f"A: {a}   B: {b}", HEADINGS, moved)
    counts = Counter(change.verdict for change in changes)
    console.print(", ".join(f"{count} {verdict}" for verdict, count in counts.items()))
    if any(change.verdict in REGRESSIONS for change in changes):
        raise typer.Exit(1)


def _print_table(console: Console, title: str | None, headings: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    figures = [Column(heading, justify="right", no_wrap=True) for heading in headings[1:]]
    table = Table(
        Column(headings[0], overflow="fold"), *figures, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), title=title,
        title_justify="left",
    )  # fmt: skip
    for row in rows:
        table.add_row(*row)
    console.print(table)


def recommend(
    shape: Annotated[
        list[str] | None, typer.Option(help="tokens x channels and options; may be given again and again.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="file.py:function that returns a model, or (model, input).")] = None,
    mixers: Annotated[str | None, typer.Option(help="The candidates, for example padre:degree=3,pom.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; default: the model's own, or cpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the model's own.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads; default: one for each core.")] = None,
    batch: Annotated[int, typer.Option(help="Of shapes that do not say.")] = 1,
    training: Annotated[bool, typer.Option("--training", help="Forward and backward, not forward alone.")] = False,
    seconds: Annotated[float, typer.Option(help="Budget for all measurements.")] = 30.0,
    out: Annotated[Path | None, typer.Option("--json", help="File for everything that was found.")] = None,
) -> None:
    """Keep attention, or replace it, and with what: by what is measured here, at these shapes or in this model.

    Example: polymix recommend --shape 4096x192:heads=3 --shape 196x384
    """
    from polymix.compare.recommend.command import run

    chosen = {"candidates": _words(mixers)} if mixers else {}
    answer = run(
        shape or [], model, out, device=device, dtype=dtype, threads=threads or _cores(), batch=batch,
        training=training, seconds=seconds, **chosen,
    )  # fmt: skip
    print(answer)


def list_() -> None:
    """Every mixer: what it can do, what it costs, its options.

    Example: polymix list
    """
    from polymix.mixers.registry import config_class, list_mixers, mixer_class

    parts = (("can do", 2), ("cost", 2), ("options (default)", 3))  # the last wide enough for every option's name
    columns = (Column(text, ratio=share, overflow="fold") for text, share in parts)
    table = Table(Column("mixer", no_wrap=True), *columns, show_lines=True, expand=True)
    for name in list_mixers():
        mixer, config = mixer_class(name), config_class(name)
        can = mixer.capabilities
        able = [word for word in ("causal", "cross", "recurrent", "any_length", "export") if getattr(can, word)]
        able += [f"{'/'.join(map(str, can.grids))}-D"] if can.grids else []
        its = ", ".join(f"{f.name}={f.default}" for f in fields(config))
        able += [f"masks: {', '.join(sorted(can.masks))}"] if can.masks else []
        table.add_row(name, ", ".join(able), _cost_line(mixer), its)
    Console().print(table)


def _cost_line(mixer: type) -> str:
    """The cost formula out of the docstring, where it stands once."""
    text = " ".join((inspect.getdoc(mixer) or "").split())
    found = re.search(r"Cost[^:]*: (.*?)(?=\. [A-Z]|\.$)", text)
    return found[1] if found else "–"


def show(
    name: Annotated[str, typer.Argument(help="A mixer, such as padre.")],
    options: Annotated[list[str] | None, typer.Argument(help="dim=192, n=4096, and options such as degree=3.")] = None,
    threads: Annotated[int | None, typer.Option(help="CPU threads for the floor; default: one for each core.")] = None,
) -> None:
    """What one mixer costs: parameters, multiply-adds, bytes, its floor here, and the paper's figure beside them.

    Example: polymix show padre degree=3 dim=192 grid=64x64
    """
    import torch

    from polymix.bench import floor, interleaved
    from polymix.bench.papers import printed
    from polymix.compare.spec import parse_options
    from polymix.mixers import create_mixer

    chosen = parse_options(options or [])
    dim, n = chosen.pop("dim", 192), chosen.pop("n", None)
    mixer = create_mixer(name, dim, **chosen)
    if n is None:
        grid = getattr(mixer.config, "grid", None)
        n = math.prod(grid) + getattr(mixer.config, "num_prefix_tokens", 0) if grid else 4096
    torch.set_num_threads(threads or _cores())
    cost = mixer.cost(n)
    seconds = interleaved({"floor": floor(cost)}, seconds=0.5)["floor"].median
    table = Table("", "here", "printed in the paper", title=f"{mixer.name}, {dim} channels, {n:,} tokens")
    figures = printed(mixer, n)
    lines: list[tuple[str, str, str]] = [
        ("parameters", f"{cost.parameters:,}", "parameters"),
        ("multiply-adds", f"{cost.multiply_adds / 1e9:.3f} G", "multiplications"),
        ("FLOPs (2 a multiply-add)", f"{cost.flops / 1e9:.3f} G", "FLOPs"),
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


def lens(
    name: Annotated[str, typer.Argument(help="A mixer, such as padre, or file.py:function that returns a module.")],
    options: Annotated[
        list[str] | None, typer.Argument(help="dim=8, options such as degree=3; shape=1x6x4 for a module of your own.")
    ] = None,
    order: Annotated[int, typer.Option(help="How many entries interact, 1 to 4.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Folder for lens.json and the pictures.")] = None,
    seed: Annotated[int, typer.Option(help="Of the weights, inputs and directions.")] = 0,
    image: Annotated[
        str | None, typer.Option(help="digits: train on them (half a minute) and draw what the mixer sees there.")
    ] = None,
) -> None:
    """What one mixer, or a module of your own, is as a function: its degree, what reaches what, what it commutes with.

    Example: polymix lens padre degree=3 grid=4x4 --out padre-lens
    """
    import torch

    from polymix import create_mixer
    from polymix.compare.results import write_atomically
    from polymix.compare.spec import parse_options
    from polymix.errors import check_choice
    from polymix.lens import load, overview

    check_choice("--image", image, (None, "digits"))
    chosen = parse_options(options or [])
    shape = chosen.pop("shape", None)
    shape = (shape,) if isinstance(shape, int) else shape
    torch.manual_seed(seed)
    own = ".py:" in name
    if own and image:
        raise OptionError("--image", image, "a mixer by name", "lens.influence takes any model that holds a mixer.")
    dim = None if own else chosen.pop("dim", 8)
    module = load(name, chosen) if dim is None else create_mixer(name, dim, **chosen)
    view = overview(module, order=order, shape=shape, seed=seed)
    if image:
        from polymix.mixers import config_class
        from polymix.tasks.influence import influence_on_digits

        view.results["influence"] = influence_on_digits(
            config_class(name)(**{key: value for key, value in chosen.items() if key != "grid"}), seed=seed
        )
        view.rows.append(("influence", str(view.results["influence"])))
    table = Table(Column("", no_wrap=True), Column(""), box=box.SIMPLE_HEAD, show_header=False, title=name)
    for row in view.rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    if out is not None:
        out.mkdir(parents=True, exist_ok=True)
        view.draw(out)
        content = {"name": name, "options": {**chosen, "dim": dim, "shape": shape}, **view.content}
        write_atomically(out / "lens.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        console.print(f"Pictures and lens.json: {out}")


def _app() -> Any:
    app = typer.Typer(
        help="Polynomial token mixers in attention's place. Example: polymix compare --quick", no_args_is_help=True,
        add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None,
    )  # fmt: skip
    app.command("compare")(compare)
    app.command("bench")(bench)
    app.command("recommend")(recommend)
    app.command("list")(list_)
    app.command("show")(show)
    app.command("lens")(lens)
    return app


def main(arguments: list[str] | None = None) -> None:
    """The console script: what polymix, or the command line itself, finds wrong is one line and exit status 2."""
    arguments = sys.argv[1:] if arguments is None else arguments
    try:
        if typer is None:
            cure = "The commands need them."
            raise MissingExtraError("typer, rich", "not installed", "pip install 'polymix[train]'", cure)
        sys.exit(_app()(arguments or ["--help"], standalone_mode=False) or 0)
    except PolymixError as error:
        message = str(error)
    except Exception as error:
        if not hasattr(error, "format_message"):  # what is not a usage error is a bug, and shows where it is
            raise
        message = error.format_message()
    print(f"polymix: {' '.join(message.split())}", file=sys.stderr)
    sys.exit(2)


if __name__ == "__main__":
    main()
