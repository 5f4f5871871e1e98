"""Image generation as a task: SiT or DiT learns on noisy images, and is measured by Fréchet distances of drawn ones."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from polymix.domains.generation import data as reading
from polymix.domains.generation import metrics as measuring
from polymix.domains.generation.data import GenerationData, Shape
from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.flow import Flow
from polymix.domains.generation.noise import noise_batches
from polymix.domains.generation.pipeline import ImagesPipeline, write_generator
from polymix.domains.generation.recipe import GenerationRecipe
from polymix.domains.generation.sit import SiT
from polymix.errors import DataError
from polymix.models.generator import ImageGenerator
from polymix.train.generators import GeneratorTask, NoiseBatches
from polymix.train.published import published
from polymix.train.task import Metric, Process

LATENT_PIXELS = 8  # pixels of a picture by a latent's, in the check before the data are read
HISTORY_IMAGES = 10  # drawn at every measurement and at HALVINGS of the steps, to show how training went
HALVINGS = 5
# What makes a run the published one.
PAPER_OPTIONS = (
    "conditional", "image_size", "patch", "mlp_ratio", "double_output", "process", "path", "target", "steps",
    "batch_size", "sampler", "sample_steps", "guidance", "samples",
)  # fmt: skip
PAPER_HOSTS = {24: (1024, "SiT-L/2"), 28: (1152, "SiT-XL/2")}  # channels and name by depth


class GenerationTask(GeneratorTask[GenerationRecipe, GenerationData]):
    """A model (images, times, classes) -> prediction, of the images' shape."""

    name = "generation"
    metrics = (
        Metric("fd", "lower"), Metric("fid", "lower"), Metric("precision", "higher"), Metric("recall", "higher"),
        Metric("accuracy", "higher", "%"),
    )  # fmt: skip
    layouts = reading.LAYOUTS
    unit = "images"
    splits = "blocks"
    fresh = ("label",)  # of a model with other classes
    plain: ClassVar[tuple[str, ...]] = ("fid", "fd", "fd_none", "accuracy")

    def check(self) -> None:
        side = self.recipe.image_size
        if self.recipe.vae is not None or self.recipe.layout == "latents":
            side = max(side // LATENT_PIXELS, 1) * self.recipe.patch  # the latents' size is not known yet
        with torch.device("meta"):
            self.check_shared(self._build((1, side, side), 2))

    def problems(self, source: str) -> list[str]:
        return reading.problems_of(source, self.recipe.layout)

    def load(self, folder: Path) -> GenerationData:
        return reading.load(self.recipe, folder, self.say)

    def build(self, data: GenerationData) -> SiT:
        model = self._build(data.shape, len(data.classes))
        if self.recipe.host_init == "published":
            model.start_as_published()
        return model

    def _build(self, shape: Shape, classes: int) -> SiT:
        recipe = self.recipe
        double = recipe.double_output or recipe.flow() == Diffusion("learned")
        return SiT(
            list(recipe.mixers_for(recipe.block_names()).values()), image_size=shape[1:], patch=recipe.patch,
            channels=shape[0], classes=classes if recipe.conditional else 0, class_dropout=recipe.class_dropout,
            dim=recipe.dim, depth=recipe.depth, heads=recipe.heads, mlp_ratio=recipe.mlp_ratio,
            match_parameters=recipe.match_parameters, position_scale=recipe.position_scale,
            gate_start=recipe.gate_start, double_output=double,
        )  # fmt: skip

    def loss(self, model: Any, batch: Any) -> Tensor:
        """The process's loss, on the times and noise that come with each sample."""
        images, labels, times, noise = batch
        labels = labels if self.recipe.conditional else None
        return self.recipe.flow().loss(model, images, labels, times=times, noise=noise)

    def infer(self, model: Any, batch: Any) -> Tensor:
        """Drawing images, from noise to the end."""
        labels = batch[1].tolist() if self.recipe.conditional else None
        return self._drawn(model, batch[0].shape[2:], len(batch[0]), labels)

    def _drawn(self, model: Any, size: Any, count: int, labels: list[int] | None) -> Tensor:
        device = next(model.parameters()).device
        return self.recipe.make_sampler().sample(
            model, size, seeds=range(count), labels=labels, flow=self.recipe.flow(), batch_size=count, device=device
        )

    def shown_at(self, step: int) -> bool:
        return step in {self.recipe.steps >> halving for halving in range(1, 1 + HALVINGS)}

    def prepare(self, model: nn.Module, data: GenerationData, step: int) -> None:
        """Draw a few images, always the same seeds, for the picture of the training."""
        count, classes = HISTORY_IMAGES, len(data.classes)
        labels = [place % classes for place in range(count)] if self.recipe.conditional else None
        data.history[step] = self._drawn(model, data.shape[1:], count, labels).cpu()

    def state(self, data: GenerationData) -> dict[str, Any]:
        return {"history": dict(data.history)}

    def load_state(self, data: GenerationData, state: Mapping[str, Any]) -> None:
        data.history.update(state["history"])

    def measure(self, model: nn.Module, data: GenerationData, process: Process) -> dict[str, float]:
        """The quality of drawn images, with what real test images and noise get beside it; see `metrics.measure`."""
        return measuring.measure(model, data, self.recipe, process)

    def details(self, model: nn.Module, data: GenerationData, process: Process) -> dict[str, Any]:
        """The metrics, of how many images they are, and how they were drawn."""
        unit = f"images by {self.recipe.sampling().words}"
        return {"metrics": self.measure(model, data, process), "count": self.recipe.samples, "unit": unit}

    def draw(self, model: nn.Module, data: GenerationData, folder: Path) -> list[Path]:
        return measuring.draw(model, data, self.recipe, folder)

    def describe(self, data: GenerationData) -> str:
        """What the model was trained on, and how images were drawn."""
        recipe, (channels, height, width) = self.recipe, data.shape
        classes = "each given its class" if recipe.conditional else "without classes"
        judged = "" if data.accuracy is None else f" Judge: {data.accuracy:.1%} of real test images right."
        learnt = f"Path {recipe.path}, target {recipe.target}."
        if recipe.process == "diffusion":
            learnt = f"Diffusion in 1,000 steps, target noise, variance {recipe.variance}."
        return (
            f"{recipe.mixer_name} in SiT, on {data.name}: {len(data.real):,} images of {channels} × {height} × {width},"
            f" {classes}; {height * width // recipe.patch**2:,} tokens. {learnt} Measured on {recipe.samples:,} images "
            f"drawn by {recipe.sampling().words}.{judged}"
        )

    def host_name(self, model: nn.Module) -> str:
        """The host with what else decides a result: the process where it is no default, the classes, the sampler."""
        recipe = self.recipe
        host = "DiT" if recipe.process == "diffusion" else "SiT"
        if recipe.process == "flow" and recipe.flow() != Flow():
            host += f", path {recipe.path}, target {recipe.target}"
        if recipe.process == "diffusion" and recipe.variance != "learned":
            host += f", {recipe.variance} variance"
        return f"{host}, {'given the class' if recipe.conditional else 'unconditional'} ({recipe.sampling().words})"

    def published(self) -> dict[str, Any] | None:
        """PoM's Table 5, where fid is measured of SiT-L/2 or SiT-XL/2 on latents of ImageNet, as published."""
        recipe, paper = self.recipe, GenerationRecipe.paper()
        dim, host = PAPER_HOSTS.get(recipe.depth, (0, ""))
        same = recipe.dim == dim and all(getattr(recipe, name) == getattr(paper, name) for name in PAPER_OPTIONS)
        if not same or recipe.inception is None or not self._is_imagenet():
            return None
        return published(self.name, data="ImageNet", split="train", host=host, mixer=recipe.mixer_name)

    def _is_imagenet(self) -> bool:
        """Whether the data are latents of ImageNet's 1,000 classes, by their names."""
        try:
            classes = reading.classes_of_latents(self.recipe)
        except DataError:  # the folder has gone
            return False
        return len(classes) == 1000 and all(re.fullmatch(r"n\d{8}", name) for name in classes)

    def save(self, model: Any, data: GenerationData, folder: Path) -> None:
        """model.pt, and generator.json, by which `ImagesPipeline` and `polymix generate` draw."""
        super().save(model, data, folder)
        vae = None if data.autoencoder is None else str(data.autoencoder.folder)
        latents = None if data.latents is None else {"vae": vae, "autoencoder": data.latents}
        classes = data.classes if model.classes else ()
        write_generator(folder, model, classes, self.recipe.flow(), self.recipe.make_sampler(), latents)

    def usage(self, data: GenerationData, folder: Path) -> list[str]:
        labels = f"class_labels=[{data.classes[0]!r}], " if self.recipe.conditional else ""
        return [
            "from polymix.domains.generation.pipeline import ImagesPipeline",
            "",
            f"pipe = ImagesPipeline.from_pretrained({str(folder)!r})",
            f"pipe({labels}num_inference_steps=50).images[0].save('image.png')",
        ]

    def check_like_training(self, data: GenerationData, summary: Mapping[str, Any]) -> None:
        if self.recipe.conditional:  # without classes, images can be compared with any others
            super().check_like_training(data, summary)

    def from_summary(self, summary: Mapping[str, Any]) -> GenerationData | None:
        return reading.from_summary(summary)

    # What convert and generate ask

    def opened(self, folder: Path, trust: bool) -> tuple[ImageGenerator, Any]:
        pipe = ImagesPipeline.from_pretrained(folder, decodes=False, trust_remote_code=trust)
        return pipe.model.cpu(), pipe.flow

    def noise(self, model: nn.Module, **options: Any) -> NoiseBatches:
        return noise_batches(model, **options)

    def images(self, folder: Path, labels: Sequence[str], *, vae: str | None, device: str, **options: Any) -> Tensor:
        pipe = ImagesPipeline.from_pretrained(folder, vae=vae, device=device, trust_remote_code=False)
        if not labels and pipe.model.classes and not pipe.model.guidable:
            labels = pipe.classes
        count = options["num_images"]
        chosen = [labels[place % len(labels)] for place in range(count)] if labels else None
        images: Tensor = pipe(chosen, **options, output_type="pt").images
        return images
