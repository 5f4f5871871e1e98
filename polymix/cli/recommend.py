"""polymix recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polymix.cli.shared import Threads, thread_count, words


def command(
    shape: Annotated[list[str] | None, typer.Option(help="Tokens x channels, with options; can be repeated.")] = None,
    model: Annotated[str | None, typer.Option(help="file.py:function that returns a model or (model, input).")] = None,
    mixers: Annotated[str | None, typer.Option(help="Candidates, for example padre:degree=3,pom.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda … (default: the model's own, or cpu).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: as device).")] = None,
    threads: Threads = None,
    batch: Annotated[int, typer.Option(help="Batch of shapes without one.")] = 1,
    training: Annotated[bool, typer.Option("--training", help="Time forward and backward, not forward alone.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for all measurements.")] = 30.0,
    out: Annotated[Path | None, typer.Option("--json", help="File for the answer as JSON.")] = None,
) -> None:
    """Should I replace attention, and with which mixer? Measures on this machine, at your shapes or in your model.

    Example: polymix recommend --shape 4096x192:heads=3 --shape 196x384
    """
    from polymix.workflows.recommend.run import run

    chosen = {} if mixers is None else {"candidates": words(mixers)}
    answer = run(
        shape or [], model, out, device=device, dtype=dtype, threads=thread_count(threads), batch=batch,
        training=training, seconds=seconds, **chosen,
    )  # fmt: skip
    print(answer)
