"""polymix train."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import Resume, Threads, bars, thread_count


def command(
    recipe: Annotated[
        str,
        typer.Argument(
            metavar="DOMAIN|FILE",
            help="A domain such as text, or a file: JSON or YAML, or Python that sets `recipe`, which is run.",
        ),
    ],
    data: Annotated[str | None, typer.Option(help="The data, a file or a folder. Default: the task's own.")] = None,
    layout: Annotated[str | None, typer.Option(help="How --data is arranged. Default: as its files say.")] = None,
    mixer: Annotated[str | None, typer.Option(help="The mixer of all layers, such as padre:degree=3.")] = None,
    plan: Annotated[
        str | None, typer.Option(help="Which layers get the mixer, such as 1:1; the others keep attention.")
    ] = None,
    preset: Annotated[
        str | None,
        typer.Option(help="Sizes and schedule by name: tiny, paper, or another that the domain's page names."),
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Folder of a trained or converted model: start from its weights.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option of the recipe: --set steps=200. Repeatable.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Folder for the model, the measurements and the report.")] = Path(
        "polymix-train"
    ),
    logger: Annotated[
        str | None, typer.Option(help="csv, tensorboard or wandb: also log to the folder logs in --out.")
    ] = None,
    check: Annotated[bool, typer.Option("--check", help="List all problems of --data; train nothing.")] = False,
    threads: Threads = None,
    resume: Resume = False,
) -> None:
    """Train a model on a domain's default data or on yours: text, pictures, fields, or a task of your own.

    The folder gets the model, results.json, report.html with its pictures, metrics.jsonl and a checkpoint. On default
    data most domains also train linear_floor, which mixes nothing; --set control=False leaves that out.

    Several processes: torchrun --nproc-per-node 2 -m polymix.cli train …

    Example: polymix train fields --mixer pom --out fields-pom
    """
    from functools import partial

    from polymix.tasks.runner import check_data, chosen_recipe, train_file

    console = Console()
    say = partial(console.print, markup=False, highlight=False, soft_wrap=True)
    options = [*(set_ or ()), *([] if logger is None else [f"logger={logger}"])]
    chosen = {"data": data, "layout": layout, "mixer": mixer, "plan": plan, "preset": preset, "init": init}
    if check:
        asked = chosen_recipe(recipe, options=options, **chosen)
        problems = check_data(asked)
        for problem in problems:
            say(problem)
        say(f"{len(problems)} problem{'s' * (len(problems) != 1)} in {asked.source}")
        raise typer.Exit(1 if problems else 0)
    with bars(console, out, saved="checkpoint/last.ckpt"):
        train_file(recipe, out, options=options, resume=resume, threads=thread_count(threads), say=say, **chosen)
