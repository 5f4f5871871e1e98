"""polymix evaluate."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from polymix.cli.shared import DATA_NAMES, AsJson, Threads, check_paths, print_json, print_table, thread_count


def command(
    folder: Annotated[Path, typer.Argument(metavar="DIR", help="Folder of a saved model.")],
    data: Annotated[
        str | None,
        typer.Option(help="Folder of images by class or of idx files; fashion-mnist; text. Default: the training's."),
    ] = None,
    layout: Annotated[str | None, typer.Option(help="How --data is arranged. Default: as its files say.")] = None,
    split: Annotated[str, typer.Option(help="held-out: what training on this data leaves out; or all.")] = "held-out",
    limit: Annotated[int | None, typer.Option(help="Images or tokens to evaluate at most.")] = None,
    batch: Annotated[int | None, typer.Option(help="Images or windows of text at once.")] = None,
    image_size: Annotated[int | None, typer.Option(help="Side of the images in pixels. Default: the model's.")] = None,
    tokens: Annotated[int | None, typer.Option(help="Tokens in a window of text. Default: as in training.")] = None,
    device: Annotated[str, typer.Option(help="Device, such as cpu or cuda.")] = "cpu",
    exported: Annotated[
        Path | None, typer.Option(help="Measure this ONNX file of the model in its place, such as one in 8 bits.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Change an option of the use, such as beam=50. Repeatable.")
    ] = None,
    threads: Threads = None,
    trust: Annotated[bool, typer.Option("--trust", help="Run code that the folder names.")] = False,
    as_json: AsJson = False,
) -> None:
    """Measure a saved model on data: accuracy for images, loss and perplexity for text.

    The model may come from polymix train, polymix convert, timm or transformers. Nothing is downloaded.

    Example: polymix evaluate vit-qt --data photos
    """
    check_paths("folder", folder)
    check_paths("--data", data, names=DATA_NAMES)
    check_paths("--exported", exported)
    import torch

    from polymix.numbers import metric
    from polymix.workflows.evaluate import Settings, evaluate

    settings = Settings(
        folder, data, split, limit, batch, image_size, tokens, device, trust, layout, exported, tuple(set_ or ())
    )
    torch.set_num_threads(thread_count(threads))
    console = Console()
    errors = Console(stderr=True)
    result = evaluate(settings, say=lambda text: errors.print(text, markup=False, highlight=False, soft_wrap=True))
    if as_json:
        print_json(result.to_dict())
        return
    rows = [
        (LABELS.get(name, name.replace("_", " ")), metric(value, result.units[name]))
        for name, value in result.metrics.items()
    ]
    count = f": {result.count:,} {result.unit}" if result.count else ""
    print_table(console, f"{result.model} on {result.data}, {result.split}{count}", ("", "measured"), rows)
    if result.classes:
        heads = [name for name in result.classes[0] if name != "name"]
        lines = [
            (row["name"], *(metric(row[name], result.units.get(name, "")) for name in heads)) for row in result.classes
        ]
        print_table(console, None, ("class", *heads), lines)


LABELS = {
    "accuracy_low": "95 % interval, from", "accuracy_high": "95 % interval, to", "top_5": "among the first five",
    "majority": "always the commonest class",
}  # fmt: skip
