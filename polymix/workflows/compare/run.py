"""One comparison: train every mixer in the same host, measure every mixer over the token counts, say what it means."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from polymix.measure.machine import check_device, manifest
from polymix.measure.sweep import Budget, Maker, alone, sweep
from polymix.mixers import MixerConfig
from polymix.models import VisionTransformer
from polymix.tasks.images import ImageData, Schedule, load_digits, load_folder
from polymix.tasks.images.training import train
from polymix.workflows.compare.results import Results
from polymix.workflows.compare.settings import Settings
from polymix.workflows.compare.verdict import answer


class Progress(Protocol):
    """Where progress goes: a step of `total` is named, then advanced."""

    def start(self, what: str, total: int) -> Callable[[int], None]: ...


def host(
    settings: Settings, channels: int, classes: int
) -> Callable[[MixerConfig, tuple[int, int], dict[str, Any]], nn.Module]:
    """The small vision transformer that every mixer is put into, for any grid of patches."""

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
    """Run (or resume) a comparison and leave its results, with the verdict, in `folder`.

    Everything that can be wrong with the settings or the data is found before anything is trained, and each finished
    training run and token count is on disk before the next begins.
    """
    mixers = settings.check()
    device = check_device(settings.device)
    torch.set_num_threads(settings.threads)
    grid = (settings.size // settings.patch,) * 2
    data = _load(settings, progress)
    build = host(settings, data.channels, len(data.classes))
    described = [_describe(label, config, build, grid, data) for label, config in mixers.items()]
    results = Results.open(folder, settings.to_dict(), manifest(device, settings.threads), resume=resume)
    schedule = Schedule(epochs=settings.epochs)
    results.set(
        data={"name": data.name, "classes": list(data.classes), "train": len(data.train[0]), "test": len(data.test[0]),
              "channels": data.channels, "image_size": data.image_size, "skipped": list(data.skipped)},
        host={"dim": settings.host_dim, "depth": settings.host_depth, "mlp_ratio": settings.host_mlp_ratio,
              "heads": settings.host_heads, "patch_size": settings.patch, "tokens": settings.host_tokens,
              "recipe": schedule.to_dict()},
        mixers=described,
    )  # fmt: skip
    _train(results, settings, mixers, data, schedule, lambda config: build(config, grid, {}), progress)
    dtype = getattr(torch, settings.dtype)
    kw = {"device": device, "dtype": dtype}
    _sweep(
        results,
        settings,
        mixers,
        alone(settings.dim, settings.heads, device, dtype),
        "alone",
        settings.tokens,
        progress,
    )
    counts = tuple(sorted({*settings.tokens, settings.host_tokens}))

    def whole(config: MixerConfig, grid: tuple[int, int]) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
        size = (grid[0] * settings.patch, grid[1] * settings.patch)
        return build(config, grid, kw), torch.randn(1, data.channels, *size, **kw), {}

    _sweep(results, settings, mixers, whole, "host", counts, progress)
    results.set(answer=answer(results.content), finished=True)
    return results


def _load(settings: Settings, progress: Progress) -> ImageData:
    if settings.data is None:
        return load_digits(settings.size)
    advance: list[Callable[[int], None]] = []

    def tell(done: int, total: int) -> None:
        if not advance:
            advance.append(progress.start("Reading images", total))
        advance[0](done)

    return load_folder(Path(settings.data), settings.size, tell)


def _describe(label: str, config: MixerConfig, build: Any, grid: tuple[int, int], data: ImageData) -> dict[str, Any]:
    """Label, options, parameters and FLOPs of the whole host on one image; building it checks that it can be built."""
    model = build(config, grid, {"device": "meta"})
    image = torch.empty(1, data.channels, data.image_size, data.image_size, device="meta")
    # The fused attention kernels are not all in the counter's table: count its two products on the plain path.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        model(image)
    parameters = sum(p.numel() for p in model.parameters())
    return {"label": label, "config": config.to_dict(), "parameters": parameters, "flops": counter.get_total_flops()}


def _train(
    results: Results, settings: Settings, mixers: dict[str, MixerConfig], data: ImageData, schedule: Schedule,
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
            results.add("training", [{"mixer": label, "seed": seed, **asdict(outcome), "losses": losses}])


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
