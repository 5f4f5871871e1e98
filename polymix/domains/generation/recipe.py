"""The options of a training that turns noise into images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from polymix.domains.generation.settings import (
    SAMPLERS,
    SCHEDULERS,
    SIZES,
    DdimSpacing,
    FlowPath,
    Normal,
    SamplerSettings,
    Target,
    Variance,
)
from polymix.errors import OptionError
from polymix.train.option_effects import Beside
from polymix.train.recipe import (
    BatchSize,
    Betas,
    CheckpointEvery,
    Count,
    Ema,
    EvaluateEvery,
    HostInit,
    LearningRate,
    LogEvery,
    NotNegative,
    Place,
    Positive,
    Recipe,
    Share,
    Steps,
    Warmup,
    WeightDecay,
    wrong,
)

if TYPE_CHECKING:
    from polymix.domains.generation.diffusion import Diffusion
    from polymix.domains.generation.flow import Flow, Sampler

SAMPLE_STEPS = 25


class GenerationRecipe(Recipe):
    """SiT, which turns noise into images by flow matching, or DiT by diffusion.

    The data are a folder of pictures, or of latents in a cache; without one, scikit-learn's digits of 8 × 8 pixels.
    """

    task: ClassVar[str] = "polymix.domains.generation.task:GenerationTask"
    after_training: ClassVar[tuple[str, ...]] = (
        "samples", "sampler", "sample_steps", "guidance", "guidance_channels", "guidance_interval", "inception",
    )  # fmt: skip
    takes_plan: ClassVar[bool] = True
    only_beside: ClassVar[tuple[Beside, ...]] = (
        *Recipe.only_beside,
        ("process", ("flow",), ("path", "target")),
        ("process", ("diffusion",), ("variance", "normal")),
        ("variance", ("learned",), ("normal",)),
        ("conditional", (True,), ("class_dropout",)),
        ("vae", (), ("cache",)),
    )
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {
        "tiny": {"steps": 4, "batch_size": 8, "dim": 8, "heads": 2, "depth": 1, "samples": 12, "sample_steps": 2,
                 "judge_steps": 4, "evaluate_every": 4, "log_every": 1},
        # SiT-XL/2 on the latents of ImageNet at 256 × 256. --set dim=1024 --set depth=24 is SiT-L/2. PoM's width
        # is not printed; with this one the model has the printed parameters.
        "paper": {**SIZES["XL"], "mixer": "pom:expand=0.75", "conditional": True,
                  "image_size": 256, "patch": 2, "mlp_ratio": 4.0, "flip": True,
                  "position_scale": 1.0, "gate_start": 0.0, "class_dropout": 0.1, "process": "flow", "path": "linear",
                  "target": "velocity", "batch_size": 256, "steps": 400_000, "learning_rate": 1e-4, "warmup": 0.0,
                  "final": 1.0, "cosine_from": "warmup", "weight_decay": 0.0, "decay": "matrices",
                  "betas": (0.9, 0.999), "ema": 0.9999, "ema_rise": "none", "ema_buffers": False, "clip": None,
                  "keep": "last", "host_init": "published", "double_output": True, "sampler": "euler_maruyama",
                  "sample_steps": 250, "guidance": 1.0, "samples": 50_000, "evaluate_every": 50_000,
                  "checkpoint_every": 10_000, "judge_steps": 20_000},
    }  # fmt: skip

    batch_size: BatchSize = 64
    steps: Steps = 4000
    learning_rate: LearningRate = 2e-3
    warmup: Warmup = 0.02
    weight_decay: WeightDecay = 0.0
    betas: Betas = (0.9, 0.999)
    ema: Ema = 0.999
    log_every: LogEvery = 50
    evaluate_every: EvaluateEvery = 2000
    checkpoint_every: CheckpointEvery = 500
    conditional: bool = Field(False, description="tell the model the class of each image")
    image_size: Count = Field(8, description="side of the pictures in pixels")
    patch: Count = Field(1, description="side of a token, in pixels or latents")
    flip: bool = Field(False, description="mirror half of the training images")
    dim: Count = Field(48, description="channels of SiT")
    heads: Count = Field(4, description="heads of mixers that leave them open")
    depth: Count = Field(3, description="blocks")
    mlp_ratio: Positive = Field(4.0, description="hidden units of the MLPs per channel")
    match_parameters: Literal["mlp", "expand"] | None = Field(
        None, description="size the MLPs or the mixers so that every block has attention's parameters; None: as given"
    )
    position_scale: NotNegative = Field(1.0, description="factor of the fixed positions")
    gate_start: float = Field(0.0, description="value of the blocks' gates at the start; 0: blocks start as identities")
    host_init: HostInit = "own"
    double_output: bool = Field(False, description="predict twice the channels, as the published checkpoints do")
    class_dropout: Share = Field(
        0.1, description='share of classes that training replaces by "none", which guidance needs'
    )
    process: Literal["flow", "diffusion"] = Field(
        "flow", description="diffusion: 1,000 discrete steps with the noise as target, as DiT and DiPoM"
    )
    path: FlowPath = Field("linear", description="of a flow, from noise to images")
    target: Target = Field("velocity", description="what the model of a flow predicts")
    variance: Variance = Field("learned", description="of a step of diffusion")
    sampler: Literal["euler", "heun", "dopri5", "euler_maruyama", "ddpm", "ddim", "dpm++"] | None = Field(
        None, description="how images are drawn; None: heun, or dpm++ for diffusion"
    )
    ddim_spacing: DdimSpacing = Field(
        "trailing",
        description="steps of ddim: from the last one down (999, 979 …), or as published (980, 960 …)",
    )
    normal: Normal = Field("exact", description="distribution in the bound of diffusion; tanh: as published, near it")
    sample_steps: Count | None = Field(None, description="steps of the sampler; None: 25, or what dopri5 chooses")
    guidance: NotNegative = Field(1.0, description="ω of classifier-free guidance; 1: none")
    guidance_channels: Count | None = Field(None, description="leading channels that are guided; None: all")
    guidance_interval: tuple[float, float] = Field((0.0, 1.0), description="first and last t at which guidance applies")
    samples: int = Field(
        1000, ge=4, description="images that are drawn to be measured, and the most real ones to compare them with"
    )
    judge_steps: Count = Field(600, description="steps in which the judge is trained, whose features measure images")
    inception: Place | None = Field(
        None, description="file with the weights of the FID's Inception network, by which fid is measured too"
    )
    vae: Place | None = Field(
        None, description="folder of an AutoencoderKL of diffusers, through which pictures become latents; None: pixels"
    )
    cache: Place | None = Field(None, description="folder for the latents; None: beside the run")

    @model_validator(mode="after")
    def _options_fit(self) -> GenerationRecipe:
        self._check_process()
        if not self.conditional and self.guidance != 1:
            raise wrong("guidance", f"{self.guidance} without conditional=True", "1", "Pass --set conditional=True.")
        if self.guidance != 1 and not self.class_dropout:
            cure = "Train with class_dropout=0.1."
            raise wrong("guidance", f"{self.guidance} with class_dropout=0", "1, as there is no 'none'", cure)
        if self.vae is not None and self.data is None:
            raise wrong("vae", f"{self.vae} for the digits", "None", "Pass a folder of pictures as --data.")
        if self.vae is None and self.layout != "latents" and self.image_size % self.patch:
            got = f"{self.patch} with image_size={self.image_size}"
            raise wrong("patch", got, "a divisor of it", "Change one of the two.")
        return self

    def _check_process(self) -> None:
        """Options of the other process, and of the sampler."""
        methods = SCHEDULERS if self.process == "diffusion" else SAMPLERS
        if self.sampler is not None and self.sampler not in methods:
            got = f"{self.sampler!r} with process={self.process}"
            raise wrong("sampler", got, ", ".join(methods), "Choose one of these, or change the process.")
        try:
            self.sampling()
        except OptionError as error:
            option = {"steps": "sample_steps", "method": "sampler", "spacing": "ddim_spacing"}.get(
                error.argument, error.argument
            )
            cure = "Pass sample_steps=25, say." if option == "sample_steps" else error.cure
            raise wrong(option, error.got, error.allowed, cure) from error

    def sampling(self, guidance: float | None = None) -> SamplerSettings:
        """The sampler's options, with its own guidance or another. Raises OptionError as `SamplerSettings` does."""
        options: dict[str, Any] = {"guidance": self.guidance if guidance is None else guidance}
        method = self.sampler or ("dpm++" if self.process == "diffusion" else "heun")
        if self.sample_steps is not None or method != "dopri5":
            options["steps"] = SAMPLE_STEPS if self.sample_steps is None else self.sample_steps
        if self.ddim_spacing != SamplerSettings.spacing:
            options["spacing"] = self.ddim_spacing
        if options["guidance"] != 1 or self.guidance == 1:
            options["guidance_channels"] = self.guidance_channels
            options["guidance_interval"] = tuple(self.guidance_interval)
        return SamplerSettings(method=method, **options)

    def flow(self) -> Flow | Diffusion:
        """The path between noise and images, and what the model predicts on it."""
        from polymix.domains.generation.diffusion import Diffusion  # these need PyTorch
        from polymix.domains.generation.flow import Flow

        return Diffusion(self.variance, self.normal) if self.process == "diffusion" else Flow(self.path, self.target)

    def make_sampler(self, guidance: float | None = None) -> Sampler:
        """The sampler, with its own guidance or another. Raises OptionError as `Sampler` does."""
        from polymix.domains.generation.flow import Sampler

        return Sampler(**vars(self.sampling(guidance)))
