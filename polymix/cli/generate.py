"""polymix generate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polymix.cli.shared import Threads, thread_count


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a causal language model and its tokenizer.")],
    prompt: Annotated[str | None, typer.Option(help="How the text begins. Default: standard input.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a prompt.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print word by word.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="Most new tokens. Default: 100, or what the model's positions leave.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the most likely token each time. Default: 0.8, or 0 with --beams.")
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="Draw among this many of the most likely tokens. Default: all.")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="Draw among the most likely tokens that have this probability together.")
    ] = None,
    beams: Annotated[int, typer.Option(help="Texts followed at once; the most likely one is kept.")] = 1,
    num: Annotated[int, typer.Option(help="Texts for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Seed of the random draws.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16 or float16. Default: as saved.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = "cpu",
    threads: Threads = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run code that the folder names.")] = False,
) -> None:
    """Continue a text with a language model from a folder.

    Text goes to standard output, everything else to standard error. Several texts are separated by a line of ---.
    Nothing is downloaded.

    Example: polymix generate polymix-train --prompt "Once upon a time" --stream
    """
    from polymix.workflows import generate

    settings = generate.Settings(max_new_tokens, temperature, top_k, top_p, beams, num, seed, stream)
    raise typer.Exit(
        generate.command(
            folder,
            prompt,
            settings,
            lines=lines,
            device=device,
            dtype=dtype,
            trust=trust,
            threads=thread_count(threads),
        )
    )
