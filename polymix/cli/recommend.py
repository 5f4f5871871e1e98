"""polymix recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polymix.cli.shared import Threads, cores, words


def command(
    shape: Annotated[
        list[str] | None, typer.Option(help="tokens x channels and options; may be given again and again.")
    ] = None,
    model: Annotated[str | None, typer.Option(help="file.py:function that returns a model, or (model, input).")] = None,
    mixers: Annotated[str | None, typer.Option(help="The candidates, for example padre:degree=3,pom.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda …; default: the model's own, or cpu.")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16; default: the model's own.")] = None,
    threads: Threads = None,
    batch: Annotated[int, typer.Option(help="Of shapes that do not say.")] = 1,
    training: Annotated[bool, typer.Option("--training", help="Forward and backward, not forward alone.")] = False,
    seconds: Annotated[float, typer.Option(help="Budget for all measurements.")] = 30.0,
    out: Annotated[Path | None, typer.Option("--json", help="File for everything that was found.")] = None,
) -> None:
    """Keep attention, or replace it, and with what: by what is measured here, at these shapes or in this model.

    Example: polymix recommend --shape 4096x192:heads=3 --shape 196x384
    """
    from polymix.workflows.recommend.command import run

    chosen = {"candidates": words(mixers)} if mixers else {}
    answer = run(
        shape or [], model, out, device=device, dtype=dtype, threads=threads or cores(), batch=batch,
        training=training, seconds=seconds, **chosen,
    )  # fmt: skip
    print(answer)
