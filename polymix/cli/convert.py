"""polymix convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import Resume, Threads, bars, cores, words
from polymix.errors import OptionError


def command(
    model: Annotated[str, typer.Option(help="timm/NAME, torchvision/NAME, a saved folder, or file.py:function.")],
    plan: Annotated[
        str, typer.Option(help="A mixer such as padre:degree=3; 1:1, all-but-last-2; LAYER=MIXER,…; or recommend.")
    ] = "padre",
    mixer: Annotated[str | None, typer.Option(help="What a plan such as 1:1 puts in; default: padre.")] = None,
    weights: Annotated[
        Path | None, typer.Option(help="State dict of the model: .safetensors, or what torch.save wrote.")
    ] = None,
    data: Annotated[str | None, typer.Option(help="Folder of images, a sub-folder a class; digits; or text.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Pixels a side; default: the model's own.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Of a text model's input; default: 512, or all it takes.")] = None,
    batch: Annotated[
        int | None, typer.Option(help="Inputs in a call; default: 32 images or 4 windows of --data, else 1.")
    ] = None,
    distill_epochs: Annotated[int, typer.Option(help="Of fine-tuning against labels and the former model.")] = 0,
    imitate_epochs: Annotated[
        int | None, typer.Option(help="Before it, of each mixer imitating its attention; default: 1 with the former.")
    ] = None,
    init: Annotated[str, typer.Option(help="inherit the attention's own maps, or fresh.")] = "inherit",
    windows: Annotated[str, typer.Option(help="keep windowed attention's windows, or merge them.")] = "keep",
    keep_host: Annotated[
        bool,
        typer.Option("--keep-host", help="Save GPT-2 and Llama as polymix keeps other hosts, not as its own models."),
    ] = False,
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = "cpu",
    threads: Threads = None,
    seconds: Annotated[float, typer.Option(help="Budget for measuring, and again for other lengths.")] = 20.0,
    lengths: Annotated[str, typer.Option(help="Times the layers' tokens, at which they are timed.")] = "0.25,1,4,16",
    seed: Annotated[int, typer.Option(help="Of fresh weights and of the order of the data.")] = 0,
    trust: Annotated[bool, typer.Option("--trust", help="Run the code that a saved folder names.")] = False,
    resume: Resume = False,
    out: Annotated[Path, typer.Option(help="New folder for the model, its report and its card.")] = Path(
        "polymix-convert"
    ),
) -> None:
    """Put mixers where a model has attention, recover its accuracy, and say what it was worth.

    A plan by layers is "blocks.*.attn=padre:degree=3,blocks.11.attn=keep"; layers that it does not name are kept.
    Nothing is downloaded: a model by name has fresh weights unless --weights has others.

    GPT-2 and Llama become language models that transformers' Auto classes load.

    Example: polymix convert --model timm/deit_tiny_patch16_224 --plan padre --out deit-padre
    """
    import torch

    from polymix.workflows.convert.command import run
    from polymix.workflows.convert.settings import Settings

    settings = Settings(
        model=model, plan=plan, mixer=mixer, weights=None if weights is None else str(weights), data=data,
        image_size=image_size, tokens=tokens, batch=batch, distill_epochs=distill_epochs,
        imitate_epochs=imitate_epochs, init=init, windows=windows, keep_host=keep_host, device=device, seed=seed,
        seconds=seconds, lengths=_factors(lengths), trust=trust,
    )  # fmt: skip
    torch.set_num_threads(threads or cores())
    with bars(Console(), out):
        said = run(settings, out, resume=resume, say=print)
    print("\n" + "\n\n".join(said))


def _factors(text: str) -> tuple[float, ...]:
    try:
        return tuple(float(word) for word in words(text))
    except ValueError as error:
        raise OptionError("--lengths", repr(text), "numbers separated by commas", "Try 0.25,1,4.") from error
