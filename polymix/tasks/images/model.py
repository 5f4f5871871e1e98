"""The SiT that a recipe asks for."""

from __future__ import annotations

from pathlib import Path

import torch

from polymix._io import write_whole
from polymix.models import Diffusion, Flow, SiT
from polymix.tasks.images.data import GeneratorData, Shape
from polymix.tasks.images.pipeline import write_generator
from polymix.tasks.images.recipe import ImagesRecipe
from polymix.tasks.initial import WEIGHTS

HEADS = ("label",)  # of a model with other classes
LATENTS = 8  # pixels a side of a latent, in the check before the data is read


def check(recipe: ImagesRecipe) -> None:
    """Raise what `build` would raise about the recipe, before any file is read."""
    side = recipe.image_size
    if recipe.vae is not None or recipe.layout == "latents":
        side = max(recipe.image_size // LATENTS, 1) * recipe.patch  # the latents' size is not known yet
    with torch.device("meta"):
        _build(recipe, (1, side, side), 2)


def build(recipe: ImagesRecipe, data: GeneratorData) -> SiT:
    """The model with fresh weights."""
    return _build(recipe, data.shape, len(data.classes))


def _build(recipe: ImagesRecipe, shape: Shape, classes: int) -> SiT:
    double = recipe.double_output or recipe.flow() == Diffusion("learned")
    return SiT(
        list(recipe.mixers_for(recipe.layers()).values()), image_size=shape[1:], patch=recipe.patch, channels=shape[0],
        classes=classes if recipe.conditional else 0, class_dropout=recipe.class_dropout, dim=recipe.dim,
        depth=recipe.depth, heads=recipe.heads, mlp_ratio=recipe.mlp_ratio, match_parameters=recipe.match_parameters,
        position_scale=recipe.position_scale, gate_start=recipe.gate_start, double_output=double,
    )  # fmt: skip


def save(model: SiT, data: GeneratorData, folder: Path) -> None:
    """model.pt, and generator.json, by which `ImagesPipeline` and `polymix generate` draw."""
    write_whole(folder / WEIGHTS, lambda path: torch.save(model.state_dict(), path))
    vae = None if data.autoencoder is None else str(data.autoencoder.folder)
    latents = None if data.latents is None else {"vae": vae, "autoencoder": data.latents}
    write_generator(folder, model, data.classes if model.classes else (), data.flow, data.sampler, latents)


def sampler_name(recipe: ImagesRecipe) -> str:
    """The sampler and its settings in words: "heun, 25 steps, guidance 4"."""
    sampler = recipe.make_sampler()
    words = [sampler.method] if sampler.method == "dopri5" else [sampler.method, f"{sampler.steps} steps"]
    if sampler.guidance != 1:
        words.append(f"guidance {sampler.guidance:g}")
        if sampler.guidance_channels is not None:
            words.append(f"of {sampler.guidance_channels} channels")
        if tuple(sampler.guidance_interval) != (0.0, 1.0):
            words.append("at t from {:g} to {:g}".format(*sampler.guidance_interval))
    return ", ".join(words)


def host_name(recipe: ImagesRecipe) -> str:
    """The host with what else decides a result: the process where it is not the default, the classes, the sampler."""
    host = "DiT" if recipe.process == "diffusion" else "SiT"
    if recipe.process == "flow" and recipe.flow() != Flow():
        host += f", path {recipe.path}, target {recipe.target}"
    if recipe.process == "diffusion" and recipe.variance != "learned":
        host += f", {recipe.variance} variance"
    return f"{host}, {'given the class' if recipe.conditional else 'unconditional'} ({sampler_name(recipe)})"


def usage(recipe: ImagesRecipe, data: GeneratorData, folder: Path) -> list[str]:
    """Python lines that load the model, for the report."""
    chosen = f"class_labels=[{data.classes[0]!r}], " if recipe.conditional else ""
    return [
        "from polymix.tasks.images import ImagesPipeline",
        "",
        f"pipe = ImagesPipeline.from_pretrained({str(folder)!r})",
        f"pipe({chosen}num_inference_steps=50).images[0].save('image.png')",
    ]
