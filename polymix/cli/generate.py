"""polymix generate."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from polymix.cli.shared import Threads, cores
from polymix.errors import DataError, OptionError

AT_ONCE = 16  # lines that the model goes on with together
BETWEEN = "---"


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="A saved causal model, with its tokenizer.")],
    prompt: Annotated[str | None, typer.Option(help="How the text begins. Default: standard input.")] = None,
    lines: Annotated[bool, typer.Option("--lines", help="Each line of standard input is a prompt.")] = False,
    stream: Annotated[bool, typer.Option("--stream", help="Print word by word.")] = False,
    max_new_tokens: Annotated[
        int | None, typer.Option(help="At most; default: 100, or what the model's positions leave.")
    ] = None,
    temperature: Annotated[
        float | None, typer.Option(help="0 takes the likeliest token each time; default: 0.8, with --beams 0.")
    ] = None,
    top_k: Annotated[int | None, typer.Option(help="Draw among so many tokens; default: all.")] = None,
    top_p: Annotated[float | None, typer.Option(help="Draw among the likeliest that have this share.")] = None,
    beams: Annotated[int, typer.Option(help="Texts followed at once, of which the likeliest is kept.")] = 1,
    num: Annotated[int, typer.Option(help="Texts for each prompt.")] = 1,
    seed: Annotated[int, typer.Option(help="Of what is drawn.")] = 0,
    dtype: Annotated[str | None, typer.Option(help="float32, bfloat16, float16; default: as saved.")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = "cpu",
    threads: Threads = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run the code that the folder names.")] = False,
) -> None:
    """Go on with a text, by a language model in a folder. Text goes to standard output, all else to standard error.

    Several texts are separated by a line of ---. Nothing is downloaded.

    Example: polymix generate polymix-train --prompt "Once upon a time" --stream
    """
    import torch

    from polymix._io import check_device
    from polymix.workflows.generate.settings import Settings

    settings = Settings(max_new_tokens, temperature, top_k, top_p, beams, num, seed, stream)
    if lines and prompt is not None:
        raise OptionError("--lines", "with --prompt", "standard input", "Leave one of the two out.")
    if lines and stream:
        raise OptionError("--lines", "with --stream", "one prompt in a stream", "Leave one of the two out.")
    check_device(device, "--device")
    torch.set_num_threads(threads or cores())

    from polymix.workflows.generate import Clock, generate, load

    model, tokenizer = load(folder, device=device, dtype=dtype, trust=trust)
    prompts = _prompts(lines) if prompt is None else [prompt]
    clock = Clock()
    try:
        for start in range(0, len(prompts), AT_ONCE):
            texts = generate(model, tokenizer, prompts[start : start + AT_ONCE], settings, clock)
            if not stream:
                begun = [BETWEEN] if start else []
                print(*begun, f"\n{BETWEEN}\n".join(texts), sep="\n", flush=True)
        print(clock, file=sys.stderr)
    except KeyboardInterrupt:
        print("Stopped.", file=sys.stderr)
        raise typer.Exit(130) from None
    except BrokenPipeError:  # whoever read, such as head, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise typer.Exit(141) from None


def _prompts(lines: bool) -> list[str]:
    """Standard input, whole but for the end of its last line, or line by line."""
    if sys.stdin.isatty():
        print("Type the prompt; Ctrl-D ends it.", file=sys.stderr)
    try:
        text = sys.stdin.read()
    except UnicodeDecodeError as error:
        raise DataError("standard input", str(error), f"text in {sys.stdin.encoding}", "Convert it.") from error
    if not lines:
        return [text.removesuffix("\n")]
    if not text:
        raise DataError("standard input", "nothing", "a prompt a line", "Write some, or leave --lines out.")
    return text.removesuffix("\n").split("\n")
