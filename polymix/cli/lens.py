"""polymix lens."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich import box
from rich.console import Console
from rich.table import Column, Table

from polymix.errors import OptionError, check_choice, check_int, check_seed
from polymix.extras import check_installed


def command(
    name: Annotated[
        str, typer.Argument(help="A mixer, such as padre or padre-3, or file.py:function that returns a module.")
    ],
    options: Annotated[
        list[str] | None,
        typer.Argument(help="dim=8, options such as degree=3; for your own module, shape=1x6x4."),
    ] = None,
    order: Annotated[int, typer.Option(help="Number of input entries that interact, 1 to 4.")] = 2,
    out: Annotated[Path | None, typer.Option(help="Folder for lens.json and the plots.")] = None,
    seed: Annotated[int, typer.Option(help="Seed of weights, inputs and directions.")] = 0,
    image: Annotated[
        str | None,
        typer.Option(help="digits: train on digits (half a minute) and plot what influences the mixer."),
    ] = None,
) -> None:
    """Measure what a mixer, or your own module, is as a function: degree, interactions, reach, symmetries.

    Example: polymix lens padre degree=3 grid=4x4 --out padre-lens
    """
    from polymix.files import output_folder

    check_choice("--image", image, (None, "digits"))
    check_seed("--seed", seed)
    check_int("--order", order, 1, 4)
    if out is not None:
        check_installed("matplotlib", extra="train", why="The plots are drawn with it.")
    with nullcontext() if out is None else output_folder(out):
        _lens(name, options or [], order, out, seed, image)


def _lens(name: str, words: list[str], order: int, out: Path | None, seed: int, image: str | None) -> None:
    """Measure, show and save."""
    import torch

    from polymix.files import call_function, write_whole
    from polymix.lens import overview
    from polymix.mixers.spec import parse_words
    from polymix.options import parse_options

    torch.manual_seed(seed)
    own = ".py:" in name
    if own and image:
        raise OptionError("--image", image, "a mixer by name", "For your own model use polymix.lens.influence.")
    options: dict[str, Any]
    if own:
        options, dim = parse_options(words), None
        shape = options.pop("shape", None)
        module = call_function(name, options)
    else:
        config, sizes = parse_words(name, words, ("dim", "shape"))
        options, dim, shape = asdict(config), sizes.get("dim", 8), sizes.get("shape")
        module = config.build(dim)
    shape = (shape,) if isinstance(shape, int) else shape
    view = overview(module, order=order, shape=shape, seed=seed)
    if image:
        from polymix.workflows.influence import influence_on_digits

        view.results["influence"] = influence_on_digits(config.without_grid(), seed=seed)
        view.rows.append(("influence", str(view.results["influence"])))
    table = Table(Column("", no_wrap=True), Column(""), box=box.SIMPLE_HEAD, show_header=False, title=name)
    for row in view.rows:
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(table)
    if out is not None:
        view.draw(out)
        content = {"name": name, "options": {**options, "dim": dim, "shape": shape}, **view.content}
        write_whole(out / "lens.json", json.dumps(content, indent=1, allow_nan=False) + "\n")
        console.print(f"Plots and lens.json: {out}")
