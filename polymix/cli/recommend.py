"""polymix recommend."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polymix.cli.shared import AsJson, Threads, print_json, thread_count, words


def command(
    shape: Annotated[list[str] | None, typer.Option(help="Tokens x channels, with options; can be repeated.")] = None,
    model: Annotated[
        str | None, typer.Option(help="timm/NAME, torchvision/NAME, a saved folder, or file.py:function.")
    ] = None,
    mixers: Annotated[str | None, typer.Option(help="Candidates, for example padre:degree=3,pom.")] = None,
    device: Annotated[str | None, typer.Option(help="cpu, cuda … (default: the model's own, or cpu).")] = None,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16 (default: as device).")] = None,
    threads: Threads = None,
    batch: Annotated[int | None, typer.Option(help="Batch of shapes without one, or of the model's input (1).")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the model's images (default: its own).")] = None,
    tokens: Annotated[int | None, typer.Option(help="Sequence length of a text model (default: its own).")] = None,
    trust: Annotated[bool, typer.Option("--trust", help="Allow the user code that a saved folder names.")] = False,
    training: Annotated[bool, typer.Option("--training", help="Time forward and backward, not forward alone.")] = False,
    seconds: Annotated[float, typer.Option(help="Time for all measurements.")] = 30.0,
    out: Annotated[Path | None, typer.Option(help="File for the answer as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Should I replace attention, and with which mixer? Measures on this machine, at your shapes or in your model.

    Nothing is downloaded: a model by name has untrained weights, which are as fast.

    Example: polymix recommend --shape 4096x192:heads=3 --shape 196x384

    Or: polymix recommend --model timm/deit_tiny_patch16_224
    """
    from polymix.workflows.recommend.run import run

    chosen = {} if mixers is None else {"candidates": words(mixers)}
    answer = run(
        shape or [], model, out, device=device, dtype=dtype, threads=thread_count(threads), batch=batch,
        training=training, seconds=seconds, image_size=image_size, tokens=tokens, trust=trust, **chosen,
    )  # fmt: skip
    if as_json:
        print_json(answer.to_dict())
    else:
        print(answer)
