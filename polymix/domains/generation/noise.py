"""Batches for models that turn noise into images, made of noise and classes by the model itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.flow import Flow
from polymix.domains.generation.sit import SiT
from polymix.errors import OptionError, ShapeError, check_int, check_number, check_seed
from polymix.models.generator import shape_of
from polymix.train.distill.batches import moved
from polymix.train.generators import NoiseBatches, prediction

Conditions = Callable[[torch.Generator, int], Mapping[str, Any]]
LABEL_DROPOUT = 0.1  # share of "none" among the classes, as SiT and DiT are trained


@torch.no_grad()
def noise_batches(
    model: Any, *, batches: int = 64, batch_size: int = 16, process: Flow | Diffusion | None = None,
    images: Tensor | None = None, conditions: Conditions | None = None, size: tuple[int, int] | None = None,
    steps: int = 16, dropped: float = LABEL_DROPOUT, answers: bool = False, seed: int = 0,
) -> NoiseBatches:  # fmt: skip
    """Batches to distil a converted generator on: noisy images at all noise levels, with times and classes.

    Levels are uniform, as in training. The noisy images are those that the model itself passes through when it draws
    without guidance, by Euler's method or by DDIM, so nothing is needed beyond noise and classes. With `images` noise
    is added to those instead.

        noise = noise_batches(model)
        report = polymix.convert(model, "pom", input=noise.input)
        polymix.distill(report, noise, forward=prediction, loss="squares")

    Args:
        model: a SiT, or a transformer of diffusers such as DiT or PixArt, before its conversion.
        batches, batch_size: how many. steps: evaluations of the model to draw an image; each gives a noisy one.
        process: what the model was trained on. None: the linear flow for SiT, `Diffusion()` for diffusers.
        images: (n, C, H, W), in the values of training. None: the model's own.
        conditions: (generator, n) -> keyword arguments of the model besides images and times. None: uniform classes,
            of which a share `dropped` is "none". PixArt needs one, for its captions.
        size: (H, W). None: as the model states.
        answers: also the model's predictions, as "labels", by which `relative_error` measures.

    Raises:
        OptionError: an option is out of range, or nobody states the size. ShapeError: images of another shape.
    """
    for name, count in (("batches", batches), ("batch_size", batch_size), ("steps", steps)):
        check_int(name, count, 1)
    check_number("dropped", dropped, 0.0, 1.0, "a share in [0, 1)", LABEL_DROPOUT)
    check_seed("seed", seed)
    own = isinstance(model, SiT)
    process = process or (Flow() if own else Diffusion())
    shape = shape_of(model, size)
    if images is not None and (images.ndim != 4 or not len(images) or tuple(images.shape[1:]) != shape):
        raise ShapeError("images", str(tuple(images.shape)), f"(n, {', '.join(map(str, shape))})", "Resize them.")
    draw = torch.Generator().manual_seed(seed)
    device = next(model.parameters()).device
    extra = process.model_options if own and isinstance(process, Diffusion) else {}
    condition = conditions or (lambda draw, count: _classes(model, draw, count, dropped))
    noisy = NoiseBatches()
    while len(noisy) < batches:
        conditioned = {**condition(draw, batch_size), **extra}

        def call(x: Tensor, level: Tensor, others: dict[str, Any] = conditioned) -> dict[str, Any]:
            return {**({"images": x, "times": level} if own else {"hidden_states": x, "timestep": level}), **others}

        noise = torch.randn(batch_size, *shape, generator=draw)
        if images is not None:
            data = images[torch.randint(len(images), (batch_size,), generator=draw)]
            level = process.level(torch.rand(batch_size, generator=draw))
            noisy.append(call(process.noised(data, noise, level), level))
            continue
        shares = (torch.arange(steps)[:, None] + torch.rand(batch_size, generator=draw)) / steps
        x, now = noise.to(device), process.level(torch.zeros(batch_size)).to(device)
        passed = []
        for then in process.level(shares).to(device):
            x = process.step(prediction(model, moved(call(x, now), device))[:, : shape[0]], x, now, then)
            now = then
            passed.append((x.cpu(), now.cpu()))
        states, levels = (torch.stack(part) for part in zip(*passed, strict=True))
        order = torch.rand(steps, batch_size, generator=draw).argsort(0)  # mixes the levels within each batch
        column = torch.arange(batch_size)
        noisy += [call(states[row, column], levels[row, column]) for row in order]
    del noisy[batches:]
    if answers:
        for batch in noisy:
            batch["labels"] = prediction(model, moved(batch, device)).cpu()
    return noisy


def _classes(model: Any, draw: torch.Generator, count: int, dropped: float) -> dict[str, Tensor]:
    """Uniform classes, some of them "none", by the name that the model gives them; {} for a model without."""
    if isinstance(model, SiT):
        name, classes, none = "classes", model.classes, model.guidable
    else:
        config: Any = getattr(model, "config", {})
        name, classes, none = "class_labels", int(config.get("num_embeds_ada_norm") or 0), True
        if config.get("caption_channels") or config.get("cross_attention_dim"):
            cure = "Pass conditions=lambda draw, n: {'encoder_hidden_states': …}."
            raise OptionError("conditions", f"None for {type(model).__name__}", "a function that makes captions", cure)
    if not classes:
        return {}
    labels = torch.randint(classes, (count,), generator=draw)
    hidden = torch.rand(count, generator=draw) < dropped
    return {name: labels.masked_fill(hidden, classes) if none else labels}
