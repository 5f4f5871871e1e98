"""How good drawn images are: the Fréchet distance to real ones, precision, recall and the judge's accuracy."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.domains.generation.data import GenerationData
from polymix.domains.generation.flow import Sampler
from polymix.domains.generation.grids import save_grid, save_rows
from polymix.domains.generation.inception import Inception
from polymix.domains.generation.quality import frechet_distance, precision_and_recall
from polymix.domains.generation.recipe import GenerationRecipe
from polymix.train.data.drawing import columns_of
from polymix.train.task import Process

OMEGAS = (1.0, 2.0, 4.0)  # of guidance, in the picture
HISTORY_ROWS = 8  # at most, in the picture of the training
RATED_IMAGES = 100  # by which the judge rates each ω


def measure(model: Any, data: GenerationData, recipe: GenerationRecipe, process: Process) -> dict[str, float]:
    """The quality of `recipe.samples` drawn images, with what real test images and noise get beside it.

    "fid", with `recipe.inception` alone, is the Fréchet distance in Inception's features of pictures, against at most
    `recipe.samples` training pictures. "fd" is that to training images in the judge's features; "fd_none" that of
    images drawn without a class; "accuracy" the share of images that the judge takes for the class they were drawn for.
    """
    assert data.judge is not None
    judge = data.judge.to(process.device)
    real, floor = _reference(data, recipe, process, "fd", judge.features)
    drawn, right = _drawn(model, data, recipe, process, recipe.make_sampler(), judge.features, recipe.conditional)
    figures = {"fd": frechet_distance(real, drawn)}
    figures["precision"], figures["recall"] = precision_and_recall(real[: len(drawn)], drawn)
    if recipe.conditional:
        figures["accuracy"] = right
        if recipe.class_dropout:
            free, _ = _drawn(model, data, recipe, process, recipe.make_sampler(1.0), judge.features, False)
            figures["fd_none"] = frechet_distance(real, free)
    if recipe.inception is None:
        return {**figures, **floor}
    if "inception" not in data.measured:
        data.measured["inception"] = Inception(recipe.inception)
    network = data.measured["inception"].to(process.device)

    def extract(images: Tensor) -> Tensor:
        return network(data.decoded(images).to(process.device))

    real, floor_of_fid = _reference(data, recipe, process, "fid", extract)
    drawn, _ = _drawn(model, data, recipe, process, recipe.make_sampler(), extract, recipe.conditional)
    return {"fid": frechet_distance(real, drawn), **figures, **floor_of_fid, **floor}


def _reference(
    data: GenerationData, recipe: GenerationRecipe, process: Process, name: str, extract: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Features of training images, and the distances of test images and of noise from them; computed once."""
    if name not in data.measured:
        with _exact(process):
            count = recipe.samples if name == "fid" else max(recipe.samples, 1000)  # Inception is slow
            train, test = data.real_features(lambda images: extract(images.to(process.device)).cpu(), count)
            noise = torch.randn(len(test), *data.shape, generator=torch.Generator().manual_seed(0))
            noise = torch.cat([extract(part.to(process.device)).cpu() for part in noise.split(64)])
        floor = {f"{name}_real": frechet_distance(train, test), f"{name}_noise": frechet_distance(train, noise)}
        data.measured[name] = train, floor
    return data.measured[name]


def _exact(process: Process) -> torch.autocast:
    """Features are computed in float32, whatever the model is sampled in."""
    return torch.autocast(torch.device(process.device).type, enabled=False)


def _drawn(
    model: Any, data: GenerationData, recipe: GenerationRecipe, process: Process, sampler: Sampler,
    extract: Callable[[Tensor], Tensor], conditional: bool,
) -> tuple[Tensor, float]:  # fmt: skip
    """Features of drawn images, in the order of their seeds, and the share that the judge names right.

    Each process draws some. All draw as many batches, the last ones perhaps in vain.
    """
    count, classes, size = recipe.samples, len(data.classes), recipe.part_size
    features: Tensor | None = None
    right = torch.zeros((), device=process.device)
    share = -(-count // process.world)
    for start in range(0, share, size):
        seeds = [place * process.world + process.rank for place in range(start, min(start + size, share))]
        labels = [seed % classes for seed in seeds]
        images = sampler.sample(
            model, data.shape[1:], seeds=seeds, labels=labels if conditional else None, flow=recipe.flow(),
            batch_size=size, device=process.device,
        )  # fmt: skip
        with _exact(process):
            extracted = extract(images.float())
            named = data.judge(images.float()).argmax(1).cpu() if conditional and data.judge is not None else None
        features = extracted.new_zeros(count, extracted.shape[1]) if features is None else features
        for row, seed in enumerate(seeds):
            if seed < count:
                features[seed] = extracted[row]
                right += bool(named is not None and named[row] == labels[row])
    assert features is not None
    return process.total(features).cpu(), (process.total(right) / count).item()


def draw(model: Any, data: GenerationData, recipe: GenerationRecipe, folder: Path) -> list[Path]:
    """predictions.png: drawn images on the left, real ones on the right, a row for each class if there are any.

    training.png has the same few images after more and more training; guidance.png classes against ω with the
    share of 100 images that the judge takes for their class, where a model can be guided.
    """
    classes, columns = data.classes, columns_of(data.shape)
    rows = min(len(classes), 10) if recipe.conditional else 4

    def drawn(count: int, sampler: Sampler, labels: list[int] | None) -> Tensor:
        images = sampler.sample(model, data.shape[1:], seeds=range(count), labels=labels, flow=recipe.flow())
        return data.pictures(images)

    labels = [place // columns for place in range(rows * columns)]
    images = drawn(rows * columns, recipe.make_sampler(), labels if recipe.conditional else None)
    real = data.pictures(_real(data, rows, columns, recipe.conditional))
    names = list(classes[:rows]) if recipe.conditional else None
    paths = [folder / "predictions.png"]
    save_grid(paths[0], [("drawn", images), ("real", real)], columns, names)
    if len(data.history) > 1:
        paths.append(folder / "training.png")
        steps = sorted(data.history)
        if len(steps) > HISTORY_ROWS:
            steps = [steps[place * (len(steps) - 1) // (HISTORY_ROWS - 1)] for place in range(HISTORY_ROWS)]
        save_rows(paths[-1], [(f"step {step:,}", data.pictures(data.history[step])) for step in steps])
    if recipe.conditional and recipe.class_dropout:
        paths.append(folder / "guidance.png")
        save_rows(paths[-1], [_guided(model, data, recipe, omega, 2 * columns) for omega in OMEGAS])
    return paths


def _guided(model: Any, data: GenerationData, recipe: GenerationRecipe, omega: float, count: int) -> tuple[str, Tensor]:
    """Images of all classes in turn at an ω, and its name with the judge's accuracy on more of them."""
    assert data.judge is not None
    labels = [place % len(data.classes) for place in range(max(RATED_IMAGES, count))]
    images = recipe.make_sampler(omega).sample(
        model, data.shape[1:], seeds=range(len(labels)), labels=labels, flow=recipe.flow()
    )
    named = data.judge.to(images.device)(images.float()).argmax(1)
    right = (named == torch.tensor(labels, device=images.device)).double().mean().item()
    return f"ω = {omega:g}, {right:.0%} right", data.pictures(images[:count])


def _real(data: GenerationData, rows: int, columns: int, by_class: bool) -> Tensor:
    """Test images (rows · columns, C, H, W), of one class in each row."""
    images: dict[int, list[Tensor]] = {row: [] for row in range(rows)}
    waiting = rows * columns
    for place in range(len(data.test)):
        image, label = data.test[place]
        row = int(label) if by_class else place % rows
        if row in images and len(images[row]) < columns:
            images[row].append(image)
            waiting -= 1
            if not waiting:
                break
    blank = -torch.ones(data.shape)
    return torch.stack([image for row in range(rows) for image in (images[row] + [blank] * columns)[:columns]])
