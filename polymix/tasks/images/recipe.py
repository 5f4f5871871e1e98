"""The options of a training that turns noise into images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from polymix.errors import OptionError, check_choice, check_int
from polymix.models import Diffusion, Flow, Sampler
from polymix.models.diffusion import SCHEDULERS
from polymix.models.flow import SAMPLERS
from polymix.models.sit import SIZES
from polymix.tasks.recipe import TaskRecipe

DEFAULT_STEPS = 25
PROCESSES = ("flow", "diffusion")


@dataclass(frozen=True)
class ImagesRecipe(TaskRecipe):
    """SiT, which turns noise into images by flow matching, or DiT by diffusion.

    `TaskRecipe` has the options that all tasks share.

    Args:
        data: a folder of pictures, or of latents in a cache; None: scikit-learn's digits of 8 × 8 pixels.
        mixer: of every block, as on the command line: "pom", "padre:degree=3".
        conditional: the model is told the class of each image. False: it must find out which image it makes.
        image_size: side of the pictures in pixels. patch: side of a token, in pixels or latents.
        flip: mirror half of the training images.
        dim, heads, depth, mlp_ratio: sizes of SiT. heads is for mixers that leave it open.
        match_parameters: "mlp" or "expand": give every block the parameters of attention's; None: sizes as given.
        position_scale, gate_start, double_output: as of `polymix.models.SiT`.
        class_dropout: share of classes that training replaces by "none", which guidance needs. For conditional=True.
        process: "flow", or "diffusion": 1,000 discrete steps with the noise as target, as DiT and DiPoM.
        path, target: of `polymix.models.Flow`. variance: of `polymix.models.Diffusion`.
        sampler: method of `polymix.models.Sampler`; None: "heun", or "dpm++" for diffusion.
        sample_steps: steps of the sampler; None: 25, or what "dopri5" chooses.
        guidance: ω of classifier-free guidance; 1: none.
        guidance_channels: leading channels that are guided; None: all.
        guidance_interval: first and last t at which guidance applies.
        samples: images that are drawn to be measured, and real images at most that they are compared with.
        judge_steps: steps in which the judge is trained, whose features measure the images.
        inception: file with the weights of the FID's Inception network; then "fid" is measured too.
        vae: folder of an AutoencoderKL of diffusers, through which pictures become latents; None: pixels.
        cache: folder for the latents; None: beside the run.
    """

    batch_size: int = 64
    steps: int = 4000
    learning_rate: float = 2e-3
    warmup: float = 0.02
    weight_decay: float = 0.0
    betas: Sequence[float] = (0.9, 0.999)
    ema: float = 0.999
    log_every: int = 50
    evaluate_every: int = 2000
    checkpoint_every: int = 500
    mixer: str = "pom"
    conditional: bool = False
    image_size: int = 8
    patch: int = 1
    flip: bool = False
    dim: int = 48
    heads: int = 4
    depth: int = 3
    mlp_ratio: float = 4.0
    match_parameters: str | None = None
    position_scale: float = 1.0
    gate_start: float = 0.0
    double_output: bool = False
    class_dropout: float = 0.1
    process: str = "flow"
    path: str = "linear"
    target: str = "velocity"
    variance: str = "learned"
    sampler: str | None = None
    sample_steps: int | None = None
    guidance: float = 1.0
    guidance_channels: int | None = None
    guidance_interval: Sequence[float] = (0.0, 1.0)
    samples: int = 1000
    judge_steps: int = 600
    inception: str | None = None
    vae: str | None = None
    cache: str | None = None

    takes_plan: ClassVar[bool] = True
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "batch_size": 8, "dim": 8, "heads": 2, "depth": 1, "samples": 12, "sample_steps": 2,
                 "judge_steps": 4, "evaluate_every": 4, "log_every": 1},
        # SiT-XL/2 on the latents of ImageNet at 256 × 256. --set dim=1024,depth=24 is SiT-L/2.
        "paper": {**SIZES["XL"], "conditional": True, "image_size": 256, "patch": 2, "flip": True, "batch_size": 256,
                  "steps": 400_000, "learning_rate": 1e-4, "warmup": 0.0, "final": 1.0, "ema": 0.9999, "clip": 1e9,
                  "double_output": True, "sampler": "euler_maruyama", "sample_steps": 250, "samples": 50_000,
                  "evaluate_every": 50_000, "checkpoint_every": 10_000, "judge_steps": 20_000},
    }  # fmt: skip

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("image_size", "patch", "dim", "heads", "depth", "judge_steps"):
            check_int(name, getattr(self, name), 1)
        check_int("samples", self.samples, 4)  # precision and recall look at three neighbours
        for name in ("conditional", "flip", "double_output"):
            check_choice(name, getattr(self, name), (True, False))
        check_choice("process", self.process, PROCESSES)
        check_choice("sampler", self.sampler, (None, *(SCHEDULERS if self.process == "diffusion" else SAMPLERS)))
        unread = ("path", "target") if self.process == "diffusion" else ("variance",)
        for name in unread:
            if getattr(self, name) != type(self).__dict__[name]:
                got = f"{getattr(self, name)} with process={self.process}"
                raise OptionError(name, got, "none, as it has no effect", "Leave it out, or change the process.")
        self.flow()
        self.make_sampler()
        if not self.conditional and self.guidance != 1:
            cure = "Pass --set conditional=True."
            raise OptionError("guidance", f"{self.guidance} without conditional=True", "1", cure)
        if self.guidance != 1 and not self.class_dropout:
            cure = "Train with class_dropout=0.1."
            raise OptionError("guidance", f"{self.guidance} with class_dropout=0", "1, as there is no 'none'", cure)
        if self.cache is not None and self.vae is None:
            raise OptionError("cache", f"{self.cache} without vae", "None", "Name the autoencoder: --set vae=FOLDER.")
        if self.vae is not None and self.data is None:
            raise OptionError("vae", f"{self.vae} for the digits", "None", "Pass a folder of pictures as --data.")
        if self.vae is None and self.layout != "latents" and self.image_size % self.patch:
            got = f"{self.patch} with image_size={self.image_size}"
            raise OptionError("patch", got, "a divisor of it", "Change one of the two.")

    def flow(self) -> Flow | Diffusion:
        """The path between noise and images, and what the model predicts on it."""
        if self.process == "diffusion":
            return Diffusion(self.variance)
        return Flow(self.path, self.target)

    def make_sampler(self, guidance: float | None = None) -> Sampler:
        """The sampler, with its own guidance or another. Raises OptionError as `Sampler` does."""
        options: dict[str, Any] = {"guidance": self.guidance if guidance is None else guidance}
        method = self.sampler or ("dpm++" if self.process == "diffusion" else "heun")
        if self.sample_steps is not None or method != "dopri5":
            options["steps"] = DEFAULT_STEPS if self.sample_steps is None else self.sample_steps
        if options["guidance"] != 1 or self.guidance == 1:
            options["guidance_channels"] = self.guidance_channels
            options["guidance_interval"] = tuple(self.guidance_interval)
        try:
            return Sampler(method=method, **options)
        except OptionError as error:
            if error.argument != "steps":
                raise
            raise OptionError("sample_steps", error.got, error.allowed, "Pass sample_steps=25, say.") from error

    def layers(self) -> Sequence[str]:
        """The names of the blocks, for plans."""
        return [f"blocks.{place}" for place in range(self.depth)]
