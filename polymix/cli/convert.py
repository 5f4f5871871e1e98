"""polymix convert."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from polymix.cli.shared import Resume, Threads, cores


def command(
    model: Annotated[str, typer.Option(help="timm/NAME, torchvision/NAME, a saved folder, or file.py:function.")],
    plan: Annotated[str, typer.Option(help="A mixer such as padre:degree=3, or 1:1, 3:1, all-but-last-2.")] = "padre",
    mixer: Annotated[str, typer.Option(help="What a pattern such as 1:1 puts in.")] = "padre",
    weights: Annotated[Path | None, typer.Option(help="State dict of the model: .safetensors, .pt, .pth.")] = None,
    data: Annotated[str | None, typer.Option(help="Folder of images, a sub-folder a class; or digits.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Of --data; default: 224, digits 8.")] = None,
    batch: Annotated[int, typer.Option(help="Images in a batch of --data.")] = 32,
    distill_epochs: Annotated[int, typer.Option(help="Of fine-tuning against labels and the former model.")] = 0,
    imitate_epochs: Annotated[int, typer.Option(help="Before it, of each mixer imitating its attention.")] = 1,
    init: Annotated[str, typer.Option(help="inherit the attention's own maps, or fresh.")] = "inherit",
    windows: Annotated[str, typer.Option(help="keep windowed attention's windows, or merge them.")] = "keep",
    device: Annotated[str, typer.Option(help="cpu, cuda …")] = "cpu",
    threads: Threads = None,
    seconds: Annotated[float, typer.Option(help="Budget for measuring.")] = 20.0,
    seed: Annotated[int, typer.Option(help="Of fresh weights and of the order of images.")] = 0,
    resume: Resume = False,
    out: Annotated[Path, typer.Option(help="Folder for the model, its report and its card.")] = Path("polymix-convert"),
) -> None:
    """Put mixers where a model has attention, recover its accuracy, and say what it was worth.

    Example: polymix convert --model timm/deit_tiny_patch16_224 --plan padre --out deit-padre
    """
    import torch

    from polymix.compare.conversion.command import run

    torch.set_num_threads(threads or cores())
    found = run(
        model, plan, out, mixer=mixer, weights=weights, data=data, image_size=image_size, batch=batch,
        distill_epochs=distill_epochs, imitate_epochs=imitate_epochs, init=init, windows=windows, device=device,
        seconds=seconds, seed=seed, resume=resume,
    )  # fmt: skip
    print(found)
    if weights is None and model.split("/")[0] in ("timm", "torchvision"):
        print("\nNo weights were given: this is the architecture alone, converted with fresh weights.")
    print(f"\nModel, report.html and README.md (the card): {out}")
