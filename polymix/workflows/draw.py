"""`polymix generate` with a model that turns noise into images: a sheet of drawn images as one picture."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from polymix.errors import OptionError
from polymix.workflows.convert.generators import generator_task

SHEET = Path("samples.png")
OPTIONS = {  # of the command, by the argument of the pipeline
    "class_labels": "--class", "steps": "--steps", "guidance": "--guidance", "method": "--sampler",
    "num_images": "--num",
}  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """What to draw.

    Args:
        labels: classes as numbers or names; image k gets the k-th, and they start again. Empty: no class, or of a model
            that was trained without "none", one class after another.
        num: images. steps, guidance, sampler: of the sampler; None: as in training.
        seed: of the first image; the next ones have the next seeds.
        vae: folder of the autoencoder of a model of latents; None: where the training found it.
        out: the picture's file.
    """

    labels: tuple[str, ...] = ()
    num: int = 1
    steps: int | None = None
    guidance: float | None = None
    sampler: str | None = None
    seed: int = 0
    vae: str | None = None
    out: Path = SHEET


def draw(folder: Path, settings: Settings, *, device: str = "cpu", threads: int | None = None) -> str:
    """Draw images into one picture; returns a sentence about it.

    Raises:
        OptionError, DataError: before anything is drawn.
    """
    from polymix.train.data.drawing import columns_of, save_sheet

    if settings.out.suffix.lower() != ".png" or not settings.out.absolute().parent.is_dir():
        allowed = "a file whose name ends in .png, in a folder that exists"
        raise OptionError("--out", str(settings.out), allowed, "Pass --out samples.png.")
    if threads:
        torch.set_num_threads(threads)
    try:
        images = generator_task().images(
            folder, settings.labels, vae=settings.vae, device=device, num_images=settings.num,
            num_inference_steps=settings.steps, guidance_scale=settings.guidance, method=settings.sampler,
            seed=settings.seed,
        )  # fmt: skip
    except OptionError as error:
        option = OPTIONS.get(error.argument)
        if option is None:
            raise
        raise OptionError(option, error.got, error.allowed, error.cure) from error
    columns = min(columns_of(images.shape[1:]), max(1, round(settings.num**0.5)))
    save_sheet(settings.out, (images * 255).round().to(torch.uint8), columns)
    return f"{settings.num} images: {settings.out}"
