"""The command `polymix search`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import (
    DATA_NAMES,
    AsJson,
    Resume,
    Threads,
    bars,
    check_paths,
    check_report,
    print_json,
    thread_count,
    words,
)


def command(
    model: Annotated[str, typer.Option(help="timm/NAME, torchvision/NAME, a saved folder, or file.py:function.")],
    data: Annotated[
        str,
        typer.Option(
            help="Folder of images by class or of idx files; fashion-mnist; digits; text; noise, for generators."
        ),
    ],
    budget: Annotated[
        float, typer.Option(help="Share of the time of the model's attention layers that all of them may take.")
    ] = 0.6,
    mixers: Annotated[
        str | None,
        typer.Option(help="Candidates (default: qt,pom,padre:degree=2,padre:degree=3,keep); keep: layers may stay."),
    ] = None,
    weights: Annotated[
        Path | None, typer.Option(help="State dict of the model: a .safetensors file, or one written by torch.save.")
    ] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels (default: the model's).")] = None,
    tokens: Annotated[
        int | None,
        typer.Option(
            help="Sequence length for text models (default: at most 512); encoders, which read lines, are timed at it."
        ),
    ] = None,
    batch: Annotated[
        int | None,
        typer.Option(help="Samples per call, also of the timings (default: 16 images or lines, 4 windows of text)."),
    ] = None,
    steps: Annotated[int, typer.Option(help="Steps of training for each candidate near the front.")] = 24,
    learning_rate: Annotated[float, typer.Option(help="The highest in these steps.")] = 6e-3,
    seconds: Annotated[float, typer.Option(help="Time for timing all layers.")] = 30.0,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda.")] = "cpu",
    threads: Threads = None,
    seed: Annotated[int, typer.Option(help="Seed of fresh weights, of the data's order and of what is held back.")] = 0,
    trust: Annotated[bool, typer.Option("--trust", help="Allow the user code that a saved folder names.")] = False,
    resume: Resume = False,
    as_json: AsJson = False,
    out: Annotated[Path, typer.Option(help="New folder for plan.json, the trained mixers and the report.")] = Path(
        "polymix-search"
    ),
) -> None:
    """Which layers should get which mixer, so that attention takes a share of its time and the output changes least?

    Every candidate is timed, scored and trained in every layer where it may be of use; the best plan is then found
    exactly, and measured beside fixed rules on other samples. Nothing is downloaded.

    Example: polymix search --model FOLDER --data FOLDER --budget 0.6 --out found

    Then: polymix convert --model FOLDER --plan found/plan.json --data FOLDER --distill-epochs 10
    """
    check_report()
    check_paths("--weights", weights)
    check_paths("--data", data, names=(*DATA_NAMES, "noise", "self", "random"))
    import torch

    from polymix.workflows.convert.settings import Settings
    from polymix.workflows.search.command import run

    settings = Settings(
        model=model, weights=None if weights is None else str(weights), data=data, image_size=image_size,
        tokens=tokens, batch=batch, device=device, seed=seed, seconds=seconds, trust=trust,
    )  # fmt: skip
    torch.set_num_threads(thread_count(threads))
    console = Console(stderr=as_json)
    with bars(console, out) as shown:
        progress = shown if console.is_terminal else None
        answer = run(
            settings, out, budget=budget, mixers=mixers and words(mixers), steps=steps, learning_rate=learning_rate,
            seconds=seconds, resume=resume, say=lambda line: None if as_json else print(line), progress=progress,
        )  # fmt: skip
    if as_json:
        print_json(answer.to_dict())
        return
    print(f"\n{answer}\n\nreport.html and plan.json are in {out}. Convert the model, with the trained mixers, by:")
    print(f"  polymix convert --model {model} --plan {out / 'plan.json'}")
