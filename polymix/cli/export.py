"""polymix export."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import DATA_NAMES, Threads, check_paths, thread_count, words


def command(
    model: Annotated[
        list[str] | None,
        typer.Option(
            help="A folder of polymix or transformers, timm/NAME, torchvision/NAME, or file.py:function. Repeat it for "
            "several models."
        ),
    ] = None,
    mixer: Annotated[str | None, typer.Option(help="A mixer alone, such as padre:grid=16x16.")] = None,
    dim: Annotated[int | None, typer.Option(help="Channels of --mixer.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens of --mixer, or of a text model.")] = None,
    modes: Annotated[
        str, typer.Option(help="Of --mixer: self, causal, cross, mask, prefill, step; or all that it has.")
    ] = "self",
    target: Annotated[
        str,
        typer.Option(help="What to write, separated by commas: onnx, int8, qnn, openvino, aoti, executorch, web."),
    ] = "onnx",
    weights: Annotated[Path | None, typer.Option(help="State dict for a model by name.")] = None,
    classes: Annotated[int | None, typer.Option(help="Number of classes of a model by name.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images, in pixels.")] = None,
    data: Annotated[
        str | None,
        typer.Option(
            help="To calibrate int8 and qnn: .npy, .npz by input name, or a folder of images. With one sub-folder per "
            "class, idx files, fashion-mnist or digits, the files are measured, too; so they are on data in any form "
            "that a training's task reads. Default: the training's own data."
        ),
    ] = None,
    schemes: Annotated[
        str, typer.Option(help="Of int8 and qnn: bits of activations and weights; one or both.")
    ] = "a8w8,a16w8",
    max_error: Annotated[
        float | None,
        typer.Option(
            help="Of int8 and qnn: as few products as it takes get 16 bits until the error is at most this. Default "
            "for a mixer alone: 0.05 in a8w8, 0.01 in a16w8."
        ),
    ] = None,
    soc: Annotated[
        str, typer.Option(help="Chip of qnn: a name, a model or Qualcomm's number, such as SM8650 or 57.")
    ] = "snapdragon-8-gen-3",
    runtime: Annotated[
        Path | None,
        typer.Option(help="For web: the folder of npm's onnxruntime-web. Default: node_modules here or above."),
    ] = None,
    seed: Annotated[int, typer.Option(help="Of random weights and inputs.")] = 0,
    threads: Threads = None,
    trust: Annotated[bool, typer.Option("--trust", help="Allow the user code that a saved folder names.")] = False,
    out: Annotated[Path, typer.Option(help="New folder for the files and manifest.json.")] = Path("polymix-export"),
) -> None:
    """Write a mixer or a model as files that run without PyTorch; each is run and compared before it is kept.

    Files that give other numbers are left in OUT-failed, with exit status 2.

    Example: polymix export --mixer padre:grid=16x16 --dim 64 --tokens 256 --target onnx --out padre-onnx
    """
    check_paths("--weights", weights)
    check_paths("--data", data, names=DATA_NAMES)
    import torch

    from polymix.workflows.export import Settings, run

    settings = Settings(
        models=model or (), mixer=mixer, dim=dim, tokens=tokens, modes=words(modes),
        weights=None if weights is None else str(weights), classes=classes, image_size=image_size,
        data=data, seed=seed, trust=trust, schemes=words(schemes), max_error=max_error, soc=soc,
        runtime=None if runtime is None else str(runtime),
    )  # fmt: skip
    torch.set_num_threads(thread_count(threads))
    console = Console()
    run(settings, out, words(target), lambda text: console.print(text, markup=False, highlight=False, soft_wrap=True))
