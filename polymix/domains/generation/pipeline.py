"""Draw images with a trained model from Python, as pipelines of diffusers do."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import polymix
from polymix.convert.model_recipes import decode, encode
from polymix.convert.saving.files import read_tensors
from polymix.devices import check_device
from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.flow import Flow, Sampler
from polymix.domains.generation.latents import Autoencoder
from polymix.domains.generation.sit import SiT
from polymix.errors import DataError, OptionError, PolymixError, check_choice, check_int, check_seed, reason_of
from polymix.files import check_folder, read_json, write_whole
from polymix.models.generator import GENERATOR
from polymix.train.data.pictures import as_image
from polymix.train.initial import WEIGHTS

SCHEMA = "polymix.generator/1"
ALLOWED = "a folder that polymix train generation or ImagesPipeline.save_pretrained wrote"


@dataclass(frozen=True)
class ImagesOutput:
    """Drawn images: pictures of Pillow, or a tensor (n, C, H, W) from 0 to 1 with output_type="pt"."""

    images: Any


class ImagesPipeline:
    """A model that turns noise into images, with all that drawing takes.

        pipe = ImagesPipeline.from_pretrained("digits-by-class")
        pipe(class_labels=[3, 3, 8], num_inference_steps=50, guidance_scale=4).images[0].save("three.png")

    Args:
        model: a SiT. classes: their names; empty for an unconditional model.
        flow: a `Flow` or `Diffusion`, what the model was trained on. sampler: how images are drawn by default.
        autoencoder: decodes the latents of a model of latents; None: the model draws pixels.

    Raises:
        OptionError: the model's latents do not fit the autoencoder, a sampler of the other process, or not a name
            for each class.
    """

    def __init__(
        self, model: Any, *, classes: Sequence[str] = (), flow: Flow | Diffusion | None = None,
        sampler: Sampler | None = None, autoencoder: Autoencoder | None = None,
    ) -> None:  # fmt: skip
        self.model, self.classes = model.eval(), tuple(classes)
        self.flow: Flow | Diffusion = flow or Flow()
        self.sampler = sampler or Sampler(method="dpm++" if isinstance(flow, Diffusion) else "heun")
        self.sampler.check_process(self.flow)
        self.autoencoder = autoencoder
        if len(self.classes) != model.classes:
            got = f"{len(self.classes)} names for a model of {model.classes} classes"
            raise OptionError("classes", got, "a name for each class", "Pass as many names.")
        if autoencoder is not None:
            autoencoder.check_channels(model.channels, "autoencoder")

    @classmethod
    def from_pretrained(
        cls, folder: str | Path, *, vae: str | Path | None = None, device: str = "cpu", trust_remote_code: bool = False,
        decodes: bool = True,
    ) -> ImagesPipeline:  # fmt: skip
        """The pipeline in a folder of `polymix train generation` or of `save_pretrained`.

        Args:
            vae: folder of the autoencoder of a model of latents; None: where the training found it.
            trust_remote_code: run the code that the folder of a converted model names.
            decodes: False leaves the autoencoder out: the pipeline then draws latents.
        Raises:
            DataError: there is no such model, or its autoencoder is missing. OptionError: it is another one.
        """
        folder, device = Path(folder), check_device(device)
        content = read_json(folder / GENERATOR, DataError, "folder", ALLOWED, "Check the path.")
        if not isinstance(content, dict) or content.get("schema") != SCHEMA:
            raise DataError("folder", f"{folder / GENERATOR} of another program or version", ALLOWED, "")
        try:
            if (folder / WEIGHTS).is_file():
                model: Any = SiT(**decode(content["model"]))
                model.load_state_dict(read_tensors(folder / WEIGHTS))
            else:
                model = polymix.load_pretrained(folder, trust=trust_remote_code)
            described = dict(content["flow"])
            process = {"flow": Flow, "diffusion": Diffusion}[described.pop("process", "flow")]
            flow: Any = process(**described)
            settings: dict[str, Any] = content["sampler"]
            sampler = Sampler(**{**settings, "guidance_interval": tuple(settings["guidance_interval"])})
            classes, latents = tuple(content["classes"]), content["latents"]
        except PolymixError:
            raise
        except Exception as error:  # whatever a damaged file makes fail
            got = f"{folder}, which cannot be read ({reason_of(error)[:200]})"
            raise DataError("folder", got, ALLOWED, "Train it again.") from error
        autoencoder = None
        if latents is None and vae is not None:
            raise OptionError("vae", f"{vae} for a model of pixels", "None", "Leave it out.")
        if latents is not None and decodes:
            place = Path(vae or latents["vae"] or "")
            if vae is None and not (place / "config.json").is_file():
                cure = "Pass vae=FOLDER, an AutoencoderKL of diffusers."
                raise DataError("vae", "no autoencoder for a model of latents", "the one it was trained with", cure)
            autoencoder = Autoencoder.load(place, device)
            autoencoder.check_channels(model.channels, "vae")
            autoencoder.check_same(latents["autoencoder"], "vae")
        return cls(model.to(device), classes=classes, flow=flow, sampler=sampler, autoencoder=autoencoder)

    def save_pretrained(self, folder: str | Path) -> None:
        """Save the model, converted or not, and how it draws. An autoencoder is named, not copied."""
        path = check_folder(folder, "folder")
        polymix.save_pretrained(self.model, path)
        (path / WEIGHTS).unlink(missing_ok=True)  # of an earlier run, which would be read first
        latents: dict[str, str | None] | None = None
        if self.autoencoder is not None:
            latents = {"vae": str(self.autoencoder.folder), "autoencoder": self.autoencoder.checksum}
        write_generator(path, None, self.classes, self.flow, self.sampler, latents)

    def __call__(
        self, class_labels: int | str | Sequence[int | str] | None = None, *, num_images: int | None = None,
        num_inference_steps: int | None = None, guidance_scale: float | None = None, method: str | None = None,
        seed: int = 0, seeds: Sequence[int] | None = None, batch_size: int = 64, output_type: str = "pil",
    ) -> ImagesOutput:  # fmt: skip
        """Draw images.

        Args:
            class_labels: a class for each image, as number or name, or one for all; None: the class "none".
            num_images: how many; None: one for each class, or 1.
            num_inference_steps, guidance_scale, method: of the sampler; None: as trained with.
            seed: of the first image; the next ones have the next seeds. seeds: one for each image instead.
            output_type: "pil", or "pt": a tensor.

        Raises:
            OptionError: a class that is not there, guidance without the class "none", or an option out of range.
            ShapeError: as many classes as images.
        """
        check_choice("output_type", output_type, ("pil", "pt"))
        check_seed("seed", seed)
        names = [class_labels] if isinstance(class_labels, (int, str)) else class_labels
        labels = None if names is None else [self._class(label) for label in names]
        count = num_images if num_images is not None else len(seeds if seeds is not None else labels or [0])
        check_int("num_images", count, 1)
        if labels is not None and len(labels) == 1:
            labels = labels * count
        chosen = range(seed, seed + count) if seeds is None else seeds
        if len(chosen) != count:
            raise OptionError("seeds", f"{len(chosen)} for {count} images", "one for each", "Pass as many.")
        drawn = self._sampler(num_inference_steps, guidance_scale, method).sample(
            self.model, tuple(self.model.options["image_size"]), seeds=chosen, labels=labels, flow=self.flow,
            batch_size=batch_size, device=next(self.model.parameters()).device,
        )  # fmt: skip
        pixels = drawn if self.autoencoder is None else self.autoencoder.decode(drawn)
        pixels = (pixels.float().clamp(-1, 1) + 1).cpu() / 2
        return ImagesOutput(pixels if output_type == "pt" else [as_picture(image) for image in pixels])

    def _sampler(self, steps: int | None, guidance: float | None, method: str | None) -> Sampler:
        """The default sampler with what was asked for. Options that the new method or guidance would ignore go."""
        sampler = self.sampler
        if method is not None and method != sampler.method:
            guided = {"guidance": sampler.guidance, "guidance_channels": sampler.guidance_channels,
                    "guidance_interval": sampler.guidance_interval}  # fmt: skip
            steps_of_both = {} if "dopri5" in (method, sampler.method) else {"steps": sampler.steps}
            sampler = Sampler(method=method, **guided, **steps_of_both)  # type: ignore[arg-type]
        if guidance is not None:
            unguided = {"guidance_channels": None, "guidance_interval": (0.0, 1.0)} if guidance == 1 else {}
            sampler = replace(sampler, guidance=guidance, **unguided)  # type: ignore[arg-type]
        return sampler if steps is None else replace(sampler, steps=steps)

    def _class(self, label: int | str) -> int:
        """The number of a class, from itself or its name."""
        if not self.classes:
            cure = "Train with --set conditional=True."
            raise OptionError("class_labels", repr(label), "None, as the model is unconditional", cure)
        if isinstance(label, str) and label in self.classes:
            return self.classes.index(label)
        number = int(label) if isinstance(label, str) and label.isdecimal() else label
        if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < len(self.classes):
            names = ", ".join(self.classes[:10]) + (" …" if len(self.classes) > 10 else "")
            allowed = f"a number from 0 to {len(self.classes) - 1} or a name ({names})"
            raise OptionError("class_labels", repr(label), allowed, "Choose a class of the model.")
        return number


def as_picture(image: Tensor) -> Any:
    """An image (1 or 3, H, W) from 0 to 1 as a picture of Pillow."""
    return as_image((image * 255).round().to(torch.uint8))


def write_generator(
    folder: Path, model: SiT | None, classes: Sequence[str], flow: Flow | Diffusion, sampler: Sampler,
    latents: dict[str, str | None] | None,
) -> None:  # fmt: skip
    """generator.json, which tells how a folder's model draws; with `model`, also how it is built.

    latents: of a model of latents, the folder of its autoencoder, if known, and its checksum.
    """
    process = "diffusion" if isinstance(flow, Diffusion) else "flow"
    content = {
        "schema": SCHEMA, "classes": list(classes), "flow": {"process": process, **asdict(flow)},
        "sampler": asdict(sampler), "latents": latents, **({} if model is None else {"model": encode(model.options)}),
    }  # fmt: skip
    write_whole(folder / GENERATOR, json.dumps(content, indent=1) + "\n")
