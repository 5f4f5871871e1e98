"""How good drawn images are: the Fréchet distance to real ones, precision, recall and the judge's accuracy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from polymix.mixers.spec import parse_mixer
from polymix.models.flow import Sampler
from polymix.tasks.images.data import GeneratorData
from polymix.tasks.images.grids import columns_of, save_grid, save_rows
from polymix.tasks.images.inception import Inception
from polymix.tasks.images.model import sampler_name
from polymix.tasks.images.quality import frechet_distance, precision_and_recall
from polymix.tasks.images.recipe import ImagesRecipe
from polymix.tasks.processes import Process

DIRECTIONS = {"fid": "down", "fd": "down", "precision": "up", "recall": "up", "accuracy": "up", "fd_none": "down",
              "fd_real": "down", "fd_noise": "down", "fid_real": "down", "fid_noise": "down"}  # fmt: skip
DIRECTIONS |= {f"{name}_plain": way for name, way in DIRECTIONS.items()}
GUIDANCE = (1.0, 2.0, 4.0)  # ω in the picture
GUIDED = 100  # images by which the judge rates each ω
SHOWN = 40  # images in a picture
# PoM, Section 4.5, Table 5: ImageNet at 256 × 256, 400,000 steps, no guidance; images per second in generation.
PAPER = {
    ("softmax", 24): {"fid": 18.8, "images_per_second": 9842, "parameters_M": 458, "source": "PoM, Table 5: SiT-L/2"},
    ("pom", 24): {"fid": 17.6, "images_per_second": 11954, "parameters_M": 414, "source": "PoM, Table 5: SiPoM-L/2"},
    ("softmax", 28): {"fid": 17.2, "images_per_second": 4041, "parameters_M": 675, "source": "PoM, Table 5: SiT-XL/2"},
    ("pom", 28): {"fid": 17.2, "images_per_second": 8146, "parameters_M": 609, "source": "PoM, Table 5: SiPoM-XL/2"},
}


def paper(recipe: ImagesRecipe) -> dict[str, Any] | None:
    """What the PoM paper reports for this mixer at this depth; None for others, plans and diffusion."""
    row: Mapping[str, Any] | None = PAPER.get((parse_mixer(recipe.mixer)[1].name, recipe.depth))
    return None if row is None or recipe.plan is not None or recipe.process != "flow" else dict(row)


def measure(model: Any, data: GeneratorData, recipe: ImagesRecipe, process: Process) -> dict[str, float]:
    """The quality of `recipe.samples` drawn images, with what real test images and noise get beside it.

    "fid", with `recipe.inception` alone, is the Fréchet distance in Inception's features of pictures, against at most
    `recipe.samples` training pictures. "fd" is that to training images in the judge's features; "fd_none" that of
    images drawn without a class; "accuracy" the share of images that the judge takes for the class they were drawn for.
    """
    assert data.judge is not None
    judge = data.judge.to(process.device)
    real, floor = _reference(data, recipe, process, "fd", judge.features)
    drawn, right = _drawn(model, data, recipe, process, recipe.make_sampler(), judge.features, recipe.conditional)
    found = {"fd": frechet_distance(real, drawn)}
    found["precision"], found["recall"] = precision_and_recall(real[: len(drawn)], drawn)
    if recipe.conditional:
        found["accuracy"] = right
        if recipe.class_dropout:
            free, _ = _drawn(model, data, recipe, process, recipe.make_sampler(1.0), judge.features, False)
            found["fd_none"] = frechet_distance(real, free)
    if recipe.inception is None:
        return {**found, **floor}
    if "inception" not in data.fixed:
        data.fixed["inception"] = Inception(recipe.inception)
    network = data.fixed["inception"].to(process.device)

    def extract(images: Tensor) -> Tensor:
        return network(data.decoded(images).to(process.device))

    real, floor_of_fid = _reference(data, recipe, process, "fid", extract)
    drawn, _ = _drawn(model, data, recipe, process, recipe.make_sampler(), extract, recipe.conditional)
    return {"fid": frechet_distance(real, drawn), **found, **floor_of_fid, **floor}


def _reference(
    data: GeneratorData, recipe: ImagesRecipe, process: Process, name: str, extract: Callable[[Tensor], Tensor]
) -> tuple[Tensor, dict[str, float]]:
    """Features of training images, and the distances of test images and of noise from them; computed once."""
    if name not in data.fixed:
        with _exact(process):
            count = recipe.samples if name == "fid" else max(recipe.samples, 1000)  # Inception is slow
            train, test = data.real_features(lambda images: extract(images.to(process.device)).cpu(), count)
            noise = torch.randn(len(test), *data.shape, generator=torch.Generator().manual_seed(0))
            noise = torch.cat([extract(part.to(process.device)).cpu() for part in noise.split(64)])
        floor = {f"{name}_real": frechet_distance(train, test), f"{name}_noise": frechet_distance(train, noise)}
        data.fixed[name] = train, floor
    return data.fixed[name]


def _exact(process: Process) -> torch.autocast:
    """Features are computed in float32, whatever the model is sampled in."""
    return torch.autocast(torch.device(process.device).type, enabled=False)


def _drawn(
    model: Any, data: GeneratorData, recipe: ImagesRecipe, process: Process, sampler: Sampler,
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
            found = extract(images.float())
            named = data.judge(images.float()).argmax(1).cpu() if conditional and data.judge is not None else None
        features = found.new_zeros(count, found.shape[1]) if features is None else features
        for row, seed in enumerate(seeds):
            if seed < count:
                features[seed] = found[row]
                right += bool(named is not None and named[row] == labels[row])
    assert features is not None
    return process.total(features).cpu(), (process.total(right) / count).item()


def draw(model: Any, data: GeneratorData, recipe: ImagesRecipe, folder: Path) -> list[Path]:
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
    made = drawn(rows * columns, recipe.make_sampler(), labels if recipe.conditional else None)
    real = data.pictures(_real(data, rows, columns, recipe.conditional))
    names = list(classes[:rows]) if recipe.conditional else None
    paths = [folder / "predictions.png"]
    save_grid(paths[0], [("drawn", made), ("real", real)], columns, names)
    if len(data.history) > 1:
        paths.append(folder / "training.png")
        kept = sorted(data.history.items())
        chosen = kept if len(kept) <= 8 else [kept[place * (len(kept) - 1) // 7] for place in range(8)]
        save_rows(paths[-1], [(f"step {step:,}", data.pictures(images)) for step, images in chosen])
    if recipe.conditional and recipe.class_dropout:
        paths.append(folder / "guidance.png")
        save_rows(paths[-1], [_guided(model, data, recipe, omega, 2 * columns) for omega in GUIDANCE])
    return paths


def _guided(model: Any, data: GeneratorData, recipe: ImagesRecipe, omega: float, shown: int) -> tuple[str, Tensor]:
    """Images of all classes in turn at an ω, and its name with the judge's accuracy on more of them."""
    assert data.judge is not None
    labels = [place % len(data.classes) for place in range(max(GUIDED, shown))]
    images = recipe.make_sampler(omega).sample(
        model, data.shape[1:], seeds=range(len(labels)), labels=labels, flow=recipe.flow()
    )
    named = data.judge.to(images.device)(images.float()).argmax(1)
    right = (named == torch.tensor(labels, device=images.device)).double().mean().item()
    return f"ω = {omega:g}, {right:.0%} right", data.pictures(images[:shown])


def _real(data: GeneratorData, rows: int, columns: int, by_class: bool) -> Tensor:
    """Test images (rows · columns, C, H, W), of one class in each row."""
    found: dict[int, list[Tensor]] = {row: [] for row in range(rows)}
    waiting = rows * columns
    for place in range(len(data.test)):
        image, label = data.test[place]
        row = int(label) if by_class else place % rows
        if row in found and len(found[row]) < columns:
            found[row].append(image)
            waiting -= 1
            if not waiting:
                break
    blank = -torch.ones(data.shape)
    return torch.stack([image for row in range(rows) for image in (found[row] + [blank] * columns)[:columns]])


def details(model: Any, data: GeneratorData, recipe: ImagesRecipe, process: Process) -> dict[str, Any]:
    """The metrics, of how many images they are, and how they were drawn."""
    return {"metrics": measure(model, data, recipe, process), "count": recipe.samples,
            "unit": f"images by {sampler_name(recipe)}"}  # fmt: skip


def describe(recipe: ImagesRecipe, data: GeneratorData) -> str:
    """What the model was trained on, and how images were drawn, for the report."""
    told = "each given its class" if recipe.conditional else "without classes"
    channels, height, width = data.shape
    judged = "" if data.accuracy is None else f" Judge: {data.accuracy:.1%} of real test images right."
    learnt = f"Path {recipe.path}, target {recipe.target}."
    if recipe.process == "diffusion":
        learnt = f"Diffusion in 1,000 steps, target noise, variance {recipe.variance}."
    return (
        f"{recipe.mixer_name} in SiT, on {data.name}: {len(data.real):,} images of {channels} × {height} × {width}, "
        f"{told}; {height * width // recipe.patch**2:,} tokens. {learnt} Measured "
        f"on {recipe.samples:,} images drawn by {sampler_name(recipe)}.{judged}"
    )
