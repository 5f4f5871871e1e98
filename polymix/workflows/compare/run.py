"""`polymix compare`: train the same model with every mixer, measure every mixer over token counts, and judge."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from types import NoneType
from typing import Any, ClassVar

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix import _io
from polymix._io import DTYPES, Progress, check_device, check_folder
from polymix.errors import OptionError, check_choice, check_int, check_number
from polymix.limits import LONGEST, check_memory
from polymix.measure.harness import Budget
from polymix.measure.machine import manifest
from polymix.measure.sweep import Maker, alone, sweep
from polymix.mixers import MixerConfig
from polymix.mixers.spec import DEFAULT, parse_mixers
from polymix.models import VisionTransformer
from polymix.pages import data_url
from polymix.tasks.classify import ImageData, Schedule, load_digits, load_folder
from polymix.tasks.classify.data import LAYOUTS, stream_folder, too_many
from polymix.tasks.classify.scenes import SCENE, load_scenes
from polymix.tasks.classify.stream import StreamedImages
from polymix.tasks.classify.training import train
from polymix.tasks.rows import UP
from polymix.workflows.compare.verdict import answer

Images = ImageData | StreamedImages
DIGITS = "digits"  # as --data
_SCENE_EPOCHS, _QUICK = 6, 2
_SAMPLES = 12  # test images that the report shows
_MOST_CLASSES = 20  # of a table of confusions


class Results(_io.Results):
    """The results of one comparison in one folder."""

    schema: ClassVar[str] = "polymix.compare/1"
    command: ClassVar[str] = "polymix compare"
    parts: ClassVar[Mapping[str, Any]] = {
        "data": None, "host": None, "mixers": [], "training": [], "sweep": [], "answer": None,
    }  # fmt: skip
    rows: ClassVar[Mapping[str, Any]] = {
        "training": {
            "mixer": (str,), "seed": (int,), "accuracy": (float, NoneType), "seconds": (float,), "losses": (list,),
        },
        "sweep": {
            "mixer": (str,), "scope": (str,), "tokens": (int,), "latency": (float, NoneType), "low": (float, NoneType),
            "high": (float, NoneType), "peak_bytes": (int, NoneType), "floor": (float, NoneType),
            "stopped": (str, NoneType),
        },
    }  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """Everything that decides what `polymix compare` computes. A run can only be resumed with the same settings.

    data: a folder of images; "digits": single handwritten digits; None: scenes of digits.
    image_size and patch_size, if None, depend on the data: 16 and 4 pixels for the scenes, 8 and 2 for the digits, 32
    and 4 for a folder. The same holds for epochs: 6 for the scenes, otherwise 30.
    """

    data: str | None = None
    mixers: str = DEFAULT
    image_size: int | None = None
    patch_size: int | None = None
    epochs: int | None = None
    seeds: int = 2
    device: str = "cpu"
    threads: int = 2
    dtype: str = "float32"
    tokens: tuple[int, ...] = (64, 256, 1024, 4096, 16384)
    dim: int = 192  # of the mixers alone, as is `heads`: DeiT-Tiny's sizes
    heads: int = 3
    host_dim: int = 64
    host_heads: int = 4
    host_depth: int = 3
    host_mlp_ratio: float = 2.0
    max_seconds: float = 10.0
    max_gib: float = 4.0
    quick: bool = False

    def check(self) -> dict[str, MixerConfig]:
        """Find mistakes in the settings. Returns the mixers by label."""
        for name, low in (("seeds", 1), ("threads", 1), ("dim", 1), ("heads", 1)):
            check_int(f"--{name}", getattr(self, name), low)
        for name in ("image_size", "patch_size", "epochs"):
            if getattr(self, name) is not None:
                check_int("--" + name.replace("_", "-"), getattr(self, name), 1)
        check_choice("--dtype", self.dtype, DTYPES)
        if self.data is None and self.size != SCENE:
            cure = "Use --data digits, which takes any size."
            raise OptionError("--image-size", self.size, f"{SCENE}, the size of the digit scenes", cure)
        if self.size % self.patch:
            raise OptionError(
                "--image-size", self.size, f"a multiple of --patch-size {self.patch}", "Change one of the two."
            )
        if not self.tokens or min(self.tokens) < 1 or len(set(self.tokens)) != len(self.tokens):
            raise OptionError("--tokens", self.tokens, "numbers from 1 up, each once", "Try --tokens 64,256,1024.")
        for name, usual in (("max_seconds", 10), ("max_gib", 4)):
            check_number("--" + name.replace("_", "-"), getattr(self, name), 1e-300, 1e15, "a number above 0", usual)
        longest = max(self.tokens)
        check_int("--tokens", longest, 1, LONGEST)
        check_memory("--tokens", f"a call with {longest:,} tokens of {self.dim} channels", 3 * 4 * longest * self.dim)
        check_memory("--image-size", f"an image of {self.size} × {self.size} pixels", 4 * 3 * self.size**2)
        # The attention of the whole model is fused; its activations in training are at least these.
        tokens = f"{self.host_tokens:,} tokens with images of {self.size} and patches of {self.patch} pixels"
        size = 4 * self.host_tokens * self.host_dim * self.host_depth * Schedule().batch_size
        check_memory("--image-size", f"a training on {tokens}", size, cure="Use smaller images or larger patches.")
        return parse_mixers(self.mixers)

    @property
    def size(self) -> int:
        return self.image_size or {None: SCENE, DIGITS: 8}.get(self.data, 32)

    @property
    def patch(self) -> int:
        return self.patch_size or (2 if self.data == DIGITS else 4)

    @property
    def passes(self) -> int:
        """Epochs of a training run."""
        return self.epochs or (_SCENE_EPOCHS if self.data is None else 30)

    @property
    def host_tokens(self) -> int:
        return (self.size // self.patch) ** 2

    def as_quick(self) -> Settings:
        """One seed, few epochs and a short sweep: a first look in about a minute."""
        return replace(
            self,
            quick=True,
            seeds=1,
            epochs=min(self.passes, _QUICK if self.data is None else 8),
            tokens=tuple(n for n in self.tokens if n <= 1024),
        )

    def to_dict(self) -> dict[str, Any]:
        values = asdict(self)
        values["epochs"] = self.passes
        values["data"] = self.data if self.data in (None, DIGITS) else str(Path(str(self.data)).resolve())
        values["tokens"] = list(self.tokens)
        return values


def host(
    settings: Settings, channels: int, classes: int
) -> Callable[[MixerConfig, tuple[int, int], dict[str, Any]], nn.Module]:
    """A function that builds the small vision transformer with a mixer, for any grid of patches."""

    def build(config: MixerConfig, grid: tuple[int, int], kw: dict[str, Any]) -> nn.Module:
        return VisionTransformer(
            config.for_heads(settings.host_heads),
            image_size=(grid[0] * settings.patch, grid[1] * settings.patch),
            patch_size=settings.patch,
            dim=settings.host_dim,
            depth=settings.host_depth,
            mlp_ratio=settings.host_mlp_ratio,
            channels=channels,
            classes=classes,
            **kw,
        )

    return build


def compare(settings: Settings, folder: Path, progress: Progress, *, resume: bool = False) -> Results:
    """Run (or resume) a comparison and save its results, with the verdict, in `folder`.

    Mistakes in the settings or the data are found before anything is trained. Each finished training run and token
    count is saved before the next begins.
    """
    mixers = settings.check()
    device = check_device(settings.device, "--device")
    check_folder(folder)
    torch.set_num_threads(settings.threads)
    grid = (settings.size // settings.patch,) * 2
    data = _load(settings, progress)
    build = host(settings, data.channels, len(data.classes))
    described = [_describe(label, config, build, grid, data) for label, config in mixers.items()]
    results = Results.open(folder, settings.to_dict(), manifest(device, settings.threads), resume=resume)
    schedule = Schedule(epochs=settings.passes, learning_rate=3e-3 if settings.data is None else 2e-3)
    results.set(
        data={"name": data.name, "classes": list(data.classes), "train": data.counts[0], "test": data.counts[1],
              "channels": data.channels, "image_size": data.image_size, "skipped": list(data.skipped),
              "majority": dict(zip(("name", "share"), data.majority, strict=True)), "samples": _samples(data)},
        host={"dim": settings.host_dim, "depth": settings.host_depth, "mlp_ratio": settings.host_mlp_ratio,
              "heads": settings.host_heads, "patch_size": settings.patch, "tokens": settings.host_tokens,
              "recipe": schedule.to_dict()},
        mixers=described,
    )  # fmt: skip
    _train(results, settings, mixers, data, schedule, lambda config: build(config, grid, {}), progress)
    dtype = getattr(torch, settings.dtype)
    kw = {"device": device, "dtype": dtype}
    mixer_alone = alone(settings.dim, settings.heads, device, dtype)
    _sweep(results, settings, mixers, mixer_alone, "alone", settings.tokens, progress)
    counts = tuple(sorted({*settings.tokens, settings.host_tokens}))

    def whole(config: MixerConfig, grid: tuple[int, int]) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
        size = (grid[0] * settings.patch, grid[1] * settings.patch)
        return build(config, grid, kw), torch.randn(1, data.channels, *size, **kw), {}

    _sweep(results, settings, mixers, whole, "host", counts, progress)
    results.set(answer=answer(results.content), rows=task_rows(results.content), finished=True)
    return results


def task_rows(content: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The training runs as rows of the form that all tasks have (`polymix.tasks.rows.COLUMNS`)."""
    parameters = {row["label"]: row["parameters"] for row in content["mixers"]}
    images, recipe = content["data"]["train"], content["host"]["recipe"]
    return [
        {"task": "classify", "host": "VisionTransformer", "mixer": row["mixer"], "seed": row["seed"],
         "metrics": {"accuracy": row["accuracy"]}, "directions": {"accuracy": UP},
         "parameters": parameters[row["mixer"]],
         "steps": recipe["epochs"] * -(-images // recipe["batch_size"]), "unit": "images",
         "training_per_second": round(recipe["epochs"] * images / row["seconds"], 2) if row["seconds"] else None,
         "inference_per_second": None, "peak_bytes": None, "paper": None}
        for row in content["training"]
    ]  # fmt: skip


def _load(settings: Settings, progress: Progress) -> Images:
    if settings.data is None:
        return load_scenes()
    if settings.data == DIGITS:
        return load_digits(settings.size)
    advance: list[Callable[[int], None]] = []

    def tell(done: int, total: int) -> None:
        if not advance:
            advance.append(progress.start("Reading images", total))
        advance[0](done)

    folder = Path(settings.data)
    read = stream_folder if too_many(folder, LAYOUTS[0], settings.size) else load_folder
    return read(folder, settings.size, tell)


def _describe(label: str, config: MixerConfig, build: Any, grid: tuple[int, int], data: Images) -> dict[str, Any]:
    """Label, options, parameters and FLOPs of the model on one image. Fails early if the model cannot be built."""
    model = build(config, grid, {"device": "meta"})
    image = torch.empty(1, data.channels, data.image_size, data.image_size, device="meta")
    # The counter does not know every fused attention kernel, so count attention's two products on the plain path.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(image)
    parameters = sum(p.numel() for p in model.parameters())
    return {"label": label, "config": config.to_dict(), "parameters": parameters, "flops": counter.get_total_flops()}


def _train(
    results: Results, settings: Settings, mixers: dict[str, MixerConfig], data: Images, schedule: Schedule,
    build: Callable[[MixerConfig], nn.Module], progress: Progress,
) -> None:  # fmt: skip
    done = {(row["mixer"], row["seed"]) for row in results.content["training"]}
    for seed in range(settings.seeds):
        for label, config in mixers.items():
            advance = progress.start(f"Training {label}, seed {seed}", schedule.epochs)
            if (label, seed) in done:
                advance(schedule.epochs)
                continue
            _, outcome = train(
                partial(build, config),
                data,
                schedule,
                seed=seed,
                device=settings.device,
                dtype=settings.dtype,
                on_epoch=advance,
            )
            losses = [loss if math.isfinite(loss) else None for loss in outcome.losses]
            row = {"mixer": label, "seed": seed, **asdict(outcome), "losses": losses}
            answers = _answers(row.pop("predictions"), data)
            results.add("training", [{**row, **answers}])


def _sample_places(data: Images) -> list[int]:
    """Test images to show, evenly spaced."""
    images = len(data.test_labels)
    count = min(_SAMPLES, images)
    return [place * images // count for place in range(count)]


def _samples(data: Images) -> list[dict[str, Any]]:
    """The images to show, each with the number of its class."""
    places = _sample_places(data)
    return [{"class": int(data.test_labels[at]), "image": data_url(data.thumbnail(at))} for at in places]


def _answers(predictions: Sequence[int], data: Images) -> dict[str, Any]:
    """What a run answered for the images to show, and how often it took each class (rows) for each class (columns)."""
    if not predictions:
        return {"samples": None, "confusion": None}
    classes = len(data.classes)
    pairs = data.test_labels * classes + torch.tensor(predictions)
    counts = torch.bincount(pairs, minlength=classes**2).reshape(classes, classes).tolist()
    samples = [predictions[place] for place in _sample_places(data)]
    return {"samples": samples, "confusion": counts if classes <= _MOST_CLASSES else None}


def _sweep(
    results: Results, settings: Settings, mixers: dict[str, MixerConfig], make: Maker, scope: str,
    tokens: tuple[int, ...], progress: Progress,
) -> None:  # fmt: skip
    done = {(row["mixer"], row["tokens"]): row["stopped"] for row in results.content["sweep"] if row["scope"] == scope}
    advance = progress.start(f"Measuring {'the mixers alone' if scope == 'alone' else 'the whole model'}", len(tokens))
    budget = Budget(seconds=settings.max_seconds, bytes=int(settings.max_gib * 2**30))
    torch.manual_seed(0)
    for step, rows in enumerate(
        sweep(mixers, list(tokens), make, scope=scope, budget=budget, device=settings.device, done=done), start=1
    ):
        results.add("sweep", [row.to_dict() for row in rows])
        advance(step)
    advance(len(tokens))
