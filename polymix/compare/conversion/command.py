"""`polymix convert`: a model in; a faster one, its report and its card out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch.utils.data import DataLoader, TensorDataset

from polymix.compare.conversion import Assessment, assess
from polymix.compare.conversion.sources import load_model
from polymix.convert import convert, save_pretrained
from polymix.convert.find import known_input
from polymix.errors import OptionError
from polymix.tasks.images import ImageData, load_digits, load_folder


def run(
    model: str,
    plan: str,
    out: Path,
    *,
    mixer: str = "padre",
    weights: Path | None = None,
    data: str | None = None,
    image_size: int | None = None,
    batch: int = 32,
    imitate_epochs: int = 1,
    distill_epochs: int = 0,
    init: str = "inherit",
    windows: str = "keep",
    device: str = "cpu",
    seconds: float = 20.0,
    seed: int = 0,
    resume: bool = False,
) -> Assessment:
    """Convert `model`, distil it on `data` where there is some, measure it, write everything to `out`.

    data: a folder of images, one sub-folder a class, or "digits". Without it nothing is trained or calibrated on real
    inputs, and without weights (or a folder or a function that has them) the architecture alone is converted.
    """
    if data is None and distill_epochs:
        raise OptionError("--distill-epochs", distill_epochs, "0 without --data", "Pass --data DIR.")
    torch.manual_seed(seed)
    images = None if data is None else _images(data, model, image_size)
    source = load_model(model, weights, None if images is None else len(images.classes))
    host = source.model.to(device).eval()
    given = source.input
    if images is not None:
        given = images.normalise(images.train[0][:batch]).to(device)
        _check_head(host, given, images)
    elif given is None:
        given = known_input(host, 1)
    report = convert(host, plan, mixer=mixer, input=given, init=init, windows=windows)
    if images is not None:
        from polymix.tasks.distill import distill

        train, test = (
            DataLoader(TensorDataset(images.normalise(part[0]), part[1]), batch, shuffle=shuffle)
            for part, shuffle in ((images.train, True), (images.test, False))
        )
        distill(
            report, train, val=test, imitate_epochs=imitate_epochs if distill_epochs else 0, epochs=distill_epochs,
            out=out / "checkpoints" if distill_epochs else None, resume=resume, device=device, seed=seed,
        )  # fmt: skip
    report.model.eval()
    found = assess(report, given, seconds=seconds)
    out.mkdir(parents=True, exist_ok=True)
    save_pretrained(report.model, out, host=model if ".py:" in model else None, metadata=found.to_dict())
    title = f"{Path(model).name} with {plan}"
    found.write(out, title=title, card={} if source.trained else {"pipeline_tag": "other"})
    return found


def _images(data: str, model: str, size: int | None) -> ImageData:
    if data == "digits":
        return load_digits(size or 8)
    return load_folder(Path(data), size or 224)


def _check_head(host: torch.nn.Module, images: torch.Tensor, data: ImageData) -> None:
    """OptionError unless the model takes these images and has an output a class."""
    try:
        with torch.no_grad():
            logits: Any = host(images[:1])
    except (RuntimeError, ValueError, AssertionError) as error:
        got = f"images {tuple(images.shape[1:])}, which the model refuses ({' '.join(str(error).split())[:200]})"
        raise OptionError("--data", got, "images that it takes", "Pass --image-size.") from error
    logits = getattr(logits, "logits", logits)
    if logits.shape[-1] != len(data.classes):
        got = f"{len(data.classes)} classes for a head of {logits.shape[-1]}"
        raise OptionError("--data", got, "as many folders as the model has classes", "Train the head first.")
