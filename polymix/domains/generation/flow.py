"""Flow matching: paths between noise and data, losses, and samplers that follow them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.settings import (
    DIFFUSION_STEPS,
    PATHS,
    SAMPLERS,
    SCHEDULERS,
    TARGETS,
    TIME_MARGIN,
    VP_MARGIN,
    SamplerSettings,
)
from polymix.errors import OptionError, ShapeError, check_choice, check_int, check_seed
from polymix.extras import needs

BETA_LOW, BETA_HIGH = 0.1, 20.0  # of the path "vp"


class Generator(Protocol):
    """What a sampler needs of a model; `SiT` has it."""

    channels: int
    classes: int
    training: bool

    @property
    def guidable(self) -> bool: ...
    def __call__(self, images: Tensor, times: Tensor, labels: Tensor | None = None, /, **options: Any) -> Tensor: ...


@dataclass(frozen=True)
class Flow:
    """A path x_t = α(t) x₁ + σ(t) x₀ from noise x₀ (t = 0) to data x₁ (t = 1), and what the model predicts on it.

        linear:  α = t,             σ = 1 − t
        gvp:     α = sin(π t / 2),  σ = cos(π t / 2)
        vp:      α = exp(−(1 − t)² · 19.9 / 4 − (1 − t) · 0.1 / 2),  σ = √(1 − α²)

    Args:
        path: "linear", "gvp" (generalised variance preserving) or "vp" (that of diffusion models).
        target: "velocity" α' x₁ + σ' x₀, "noise" x₀ or "score" −x₀ / σ.

    Raises:
        OptionError: path or target is none of these.
    Source: Ma et al. 2024 (SiT), Section 2.
    """

    path: str = "linear"
    target: str = "velocity"

    def __post_init__(self) -> None:
        check_choice("path", self.path, PATHS)
        check_choice("target", self.target, TARGETS)

    @property
    def times(self) -> tuple[float, float]:
        """The first and the last time at which images are drawn: where velocities are finite."""
        return self._times(TIME_MARGIN)

    def _times(self, vp_margin: float) -> tuple[float, float]:
        if self.path == "vp":
            return 0.0, 1.0 - vp_margin
        return (0.0, 1.0) if self.target == "velocity" else (TIME_MARGIN, 1.0 - TIME_MARGIN)

    def level(self, share: Tensor) -> Tensor:
        """The time t in training at shares of the way from noise to data; on the path "vp" up to 1 - 1e-5."""
        low, high = self._times(VP_MARGIN)
        return share * (high - low) + low

    def noised(self, data: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t of data and noise (B, C, H, W) at times t (B,)."""
        alpha, sigma, *_ = (c.to(data.dtype).view(-1, 1, 1, 1) for c in self.coefficients(t))
        return alpha * data + sigma * noise

    def step(self, out: Tensor, x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """x (B, C, H, W) at times `then` (B,), by Euler's method from the prediction at times `now`."""
        return x + (then - now).to(x.dtype).view(-1, 1, 1, 1) * self.velocity(out, x, now)

    def coefficients(self, t: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """α, σ and their derivatives α', σ' at t."""
        if self.path == "linear":
            return t, 1 - t, torch.ones_like(t), -torch.ones_like(t)
        if self.path == "gvp":
            angle = t * math.pi / 2
            return angle.sin(), angle.cos(), math.pi / 2 * angle.cos(), -math.pi / 2 * angle.sin()
        rest, spread = 1 - t, BETA_HIGH - BETA_LOW
        exponent = rest**2 * spread / 4 + rest * BETA_LOW / 2
        alpha, sigma = (-exponent).exp(), (-torch.expm1(-2 * exponent)).sqrt()
        growth = alpha * (rest * spread + BETA_LOW) / 2
        return alpha, sigma, growth, -alpha * growth / sigma

    def loss(
        self, model: Generator, data: Tensor, labels: Tensor | None = None, *, draw: torch.Generator | None = None,
        times: Tensor | None = None, noise: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The mean square error of the target, at uniform times and fresh noise; of σ · score for the score.

        Args:
            model: predicts from (x_t, t, labels). data: (B, C, H, W). labels: (B,) or None.
            draw: generator for times and noise; None: PyTorch's own.
            times, noise: given instead of drawn: (B,) in [0, 1), as shares of the path's times, and of data's shape.
        """
        times = torch.rand(len(data), generator=draw, device=data.device) if times is None else times
        if noise is None:
            noise = torch.randn(data.shape, generator=draw, device=data.device, dtype=data.dtype)
        t = self.level(times)
        _, sigma, growth, decay = (c.to(data.dtype).view(-1, 1, 1, 1) for c in self.coefficients(t))
        out = model(self.noised(data, noise, t), t, labels)
        if self.target == "velocity":
            return (out - growth * data - decay * noise).square().mean()
        return (out - noise if self.target == "noise" else sigma * out + noise).square().mean()

    def velocity(self, out: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The velocity (B, C, H, W) that a prediction means at x and t (B,)."""
        if self.target == "velocity":
            return out
        alpha, sigma, growth, decay = (c.to(x.dtype).view(-1, 1, 1, 1) for c in self.coefficients(t))
        noise = out if self.target == "noise" else -sigma * out
        return growth * (x - sigma * noise) / alpha + decay * noise

    def score(self, out: Tensor, x: Tensor, t: Tensor) -> Tensor:
        """The score (B, C, H, W) that a prediction means at x and t (B,), with t < 1."""
        if self.target == "score":
            return out
        alpha, sigma, growth, decay = (c.to(x.dtype).view(-1, 1, 1, 1) for c in self.coefficients(t))
        if self.target == "noise":
            return -out / sigma
        return (alpha * out - growth * x) / (sigma * (growth * sigma - alpha * decay))


class Sampler(SamplerSettings):
    """How images are drawn from a model of a flow or of diffusion.

        ODE:  dx = v dt          SDE:  dx = (v + w s) dt + √(2 w) dB,   w = diffusion · σ(t)

    with the velocity v and the score s. Guidance replaces the prediction by p(none) + ω (p(class) − p(none)). Euler
    evaluates the model once a step, Heun twice; guidance doubles both. The seed of an image decides all its noise, so
    the images of given seeds do not depend on the batch size.

    Diffusion is drawn by schedulers of diffusers (the extra `diffusion`); its step s counts as t = 1 − s / 1,000.

    Args:
        method: "euler", "heun", "dopri5" (adaptive; one image at a time) or "euler_maruyama" (the SDE) for a `Flow`;
            "ddpm", "ddim" or "dpm++" (DPM-Solver++ of second order, in equal steps of the log SNR) for `Diffusion`.
        steps: number of steps, of "euler_maruyama" with the final one; for diffusion at most 1,000, and for "ddim" a
            divisor of it. "dopri5" chooses its own and takes no other value than the default. (SiT's code counts the
            points of "euler" and "heun", one more than the steps.)
        guidance: ω; 1: none.
        guidance_channels: number of leading channels that are guided (3 in the published code); None: all.
        guidance_interval: first and last t at which guidance applies.
        diffusion: factor of the diffusion of the SDE.
        last_step: length of the final step of the SDE, which adds no noise. 0.04, as published, for 250 steps.
        rtol, atol: tolerances of "dopri5".
        spacing: which steps "ddim" takes: "trailing", from the last one down (999, 979 … 19 of 50), or "leading", as in
            the authors' code (980, 960 … 0).

    Raises:
        OptionError: an option is out of range, or has no effect with the method.
    Source: Ma et al. 2024 (SiT), Sections 2.4 and 3.5; Kynkäänniemi et al. 2024 (guidance in an interval).
    """

    @torch.no_grad()
    def sample(
        self, model: Generator, size: tuple[int, int], *, seeds: Sequence[int], labels: Sequence[int] | None = None,
        flow: Flow | Diffusion | None = None, batch_size: int = 64, device: torch.device | str = "cpu",
    ) -> Tensor:  # fmt: skip
        """Images (len(seeds), channels, H, W), in the values of the training data.

        Args:
            model: a SiT in eval mode, on `device`. size: (H, W) of the images. seeds: one for each image.
            labels: a class for each image; None: unconditional, or the class "none".
            flow: what the model was trained on; None: the linear path and velocities.

        Raises:
            OptionError: a class that the model lacks, guidance without classes or without the class "none", or a method
                of the other process. ShapeError: not as many classes as seeds. MissingExtraError: "dopri5" without
                torchdiffeq, or diffusion without diffusers.
        """
        flow = Flow() if flow is None else flow
        self.check_process(flow)
        self._check(model, seeds, labels, batch_size)
        step = 1 if self.method == "dopri5" else batch_size
        parts = []
        for start in range(0, len(seeds), step):
            # Noise comes from the CPU, where a seed means the same on every machine.
            draws = [torch.Generator().manual_seed(seed) for seed in seeds[start : start + step]]
            chosen = None if labels is None else torch.tensor(labels[start : start + step], device=device)
            parts.append(self._run(model, flow, (model.channels, *size), draws, chosen, device))
        return torch.cat(parts)

    def check_process(self, flow: Flow | Diffusion) -> None:
        """Raise OptionError if the method does not draw from models of this process."""
        allowed, process = (SCHEDULERS, "diffusion") if isinstance(flow, Diffusion) else (SAMPLERS, "a flow")
        if self.method not in allowed:
            got = f"{self.method!r} for a model of {process}"
            raise OptionError("method", got, "one of " + ", ".join(allowed), "Choose another sampler.")

    def _check(self, model: Generator, seeds: Sequence[int], labels: Sequence[int] | None, batch_size: int) -> None:
        check_int("batch_size", batch_size, 1)
        if model.training:
            raise OptionError("model", "a model in training mode", "one in eval mode", "Call model.eval() first.")
        if not len(seeds):
            raise OptionError("seeds", "none", "at least one seed", "Pass seeds=range(16).")
        for seed in seeds:
            check_seed("seeds", seed)
        if labels is not None:
            if len(labels) != len(seeds):
                raise ShapeError("labels", f"{len(labels)} classes", f"{len(seeds)}, one a seed", "Pass as many.")
            for label in labels:
                if not model.classes:
                    raise OptionError("labels", "classes", "None, as the model is unconditional", "Leave them out.")
                check_int("labels", label, 0, model.classes - 1)
        elif model.classes and not model.guidable:
            cure = "Pass classes, or train with class_dropout=0.1."
            raise OptionError("labels", "None", "classes, as the model has no class 'none'", cure)
        if self.guidance != 1 and (labels is None or not model.guidable):
            if labels is None:
                raise OptionError("guidance", str(self.guidance), "1 without classes", "Pass classes.")
            cure = "Train with class_dropout=0.1."
            raise OptionError("guidance", str(self.guidance), "1, as the model has no class 'none'", cure)
        if self.guidance_channels is not None and self.guidance_channels > model.channels:
            check_int("guidance_channels", self.guidance_channels, 1, model.channels)

    def _predict(
        self, model: Generator, x: Tensor, time: float, labels: Tensor | None, step: int | None = None, **options: bool
    ) -> Tensor:
        """The guided prediction at a time, which the model is told as `step` if it counts steps."""
        t = torch.full((len(x),), float(time if step is None else step), device=x.device)
        low, high = self.guidance_interval
        if self.guidance == 1 or labels is None or not low <= time <= high:
            return model(x, t, labels, **options)
        both = torch.cat((labels, torch.full_like(labels, model.classes)))
        conditional, unconditional = model(torch.cat((x, x)), torch.cat((t, t)), both, **options).chunk(2)
        guided = unconditional + self.guidance * (conditional - unconditional)
        channels = self.guidance_channels or x.shape[1]  # what follows are learned variances
        return (
            guided if channels == guided.shape[1] else torch.cat((guided[:, :channels], conditional[:, channels:]), 1)
        )

    def _run(
        self, model: Generator, flow: Flow | Diffusion, shape: tuple[int, ...], draws: list[torch.Generator],
        labels: Tensor | None, device: torch.device | str,
    ) -> Tensor:  # fmt: skip
        def noise() -> Tensor:
            return torch.stack([torch.randn(shape, generator=draw) for draw in draws]).to(device)

        if isinstance(flow, Diffusion):
            options = flow.model_options

            def predict(x: Tensor, step: int) -> Tensor:
                return self._predict(model, x, 1 - step / DIFFUSION_STEPS, labels, step, **options)

            return flow.run(self.method, self.steps, predict, noise(), draws, self.spacing)

        def velocity(time: float, x: Tensor) -> Tensor:
            return flow.velocity(self._predict(model, x, time, labels), x, torch.full((len(x),), time, device=x.device))

        def drift(time: float, x: Tensor) -> tuple[Tensor, Tensor]:
            """Drift of the SDE and its diffusion."""
            out, t = self._predict(model, x, time, labels), torch.full((len(x),), time, device=x.device)
            width = self.diffusion * flow.coefficients(t)[1].view(-1, 1, 1, 1)
            return flow.velocity(out, x, t) + width * flow.score(out, x, t), width

        (start, end), x, steps = flow.times, noise(), self.steps
        if self.method == "dopri5":
            return _dopri5(velocity, x, start, end, self.rtol, self.atol)
        if self.method == "euler_maruyama":
            end, steps = 1.0 - self.last_step, steps - 1
        step = (end - start) / steps
        for i in range(steps):
            now, then = start + i * step, start + (i + 1) * step if i + 1 < steps else end
            if self.method == "euler_maruyama":
                slope, width = drift(now, x)
                x = x + step * slope + (2 * step * width).sqrt() * noise()
                continue
            slope = velocity(now, x)
            if self.method == "heun":
                slope = (slope + velocity(then, x + step * slope)) / 2
            x = x + step * slope
        return x + self.last_step * drift(end, x)[0] if self.method == "euler_maruyama" else x


def _dopri5(
    velocity: Callable[[float, Tensor], Tensor], x: Tensor, start: float, end: float, rtol: float, atol: float
) -> Tensor:
    with needs("flow"):
        from torchdiffeq import odeint
    span = torch.tensor((start, end), device=x.device)
    out: Tensor = odeint(lambda t, y: velocity(float(t), y), x, span, rtol=rtol, atol=atol, method="dopri5")[-1]
    return out
