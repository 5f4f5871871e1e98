"""Diffusion in discrete steps, as DiT trains it: target noise, learned variances, schedulers of diffusers."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from polymix.compat import cure_torchvision
from polymix.domains.generation.settings import DIFFUSION_STEPS as STEPS
from polymix.domains.generation.settings import NORMALS, VARIANCES, check_steps
from polymix.errors import check_choice
from polymix.extras import needs

BETA_LOW, BETA_HIGH = 1e-4, 0.02
HALF_BIN = 1 / 255  # of a value between -1 and 1 with 8 bits
LAST_BIN = 0.999  # beyond which a value is in the last one, in the published code
MIN_PROBABILITY = 1e-12  # whose logarithm is taken


@dataclass(frozen=True)
class Diffusion:
    """A chain of 1,000 steps from data x to noise, and a model that predicts the noise ε of step s.

        x_s = √ᾱ_s x + √(1 − ᾱ_s) ε,   ᾱ_s = Π (1 − β_i),   β from 0.0001 to 0.02 in equal steps

    The model's second half of channels v places the logarithm of the variance of a step back between its bounds:
    log Σ = u log β_s + (1 − u) log β̃_s with u = (v + 1) / 2 and β̃_s = β_s (1 − ᾱ_{s−1}) / (1 − ᾱ_s).

    Args:
        variance: "learned", or "fixed" at β̃, which needs no second half of channels. DiT learns it.
        normal: the distribution in `bound`: "exact", or "tanh", as the published code approximates it.

    Raises:
        OptionError: variance or normal is neither.
    Source: Ho et al. 2020; Nichol and Dhariwal 2021, Sections 2 and 3.1; Peebles and Xie 2023 (DiT), Section 3.1.
    """

    variance: str = "learned"
    normal: str = "exact"

    def __post_init__(self) -> None:
        check_choice("variance", self.variance, VARIANCES)
        check_choice("normal", self.normal, NORMALS)

    @property
    def model_options(self) -> dict[str, bool]:
        """What a model is called with besides images, steps and classes."""
        return {"all_channels": True} if self.variance == "learned" else {}

    def level(self, share: Tensor) -> Tensor:
        """The step s at shares of the way from noise to data."""
        return ((1 - share) * STEPS).long().clamp(0, STEPS - 1)

    def noised(self, data: Tensor, noise: Tensor, steps: Tensor) -> Tensor:
        """x_s of data and noise (B, C, H, W) at steps s (B,)."""
        keep, spread = _chain(steps, data)[:2]
        return keep * data + spread * noise

    def step(self, out: Tensor, x: Tensor, now: Tensor, then: Tensor) -> Tensor:
        """x (B, C, H, W) at steps `then` (B,), by DDIM's method from the predicted noise at steps `now`."""
        keep, spread = _chain(now, x)[:2]
        return self.noised((x - spread * out) / keep, out, then)

    def loss(
        self, model: Any, data: Tensor, labels: Tensor | None = None, *, draw: torch.Generator | None = None,
        times: Tensor | None = None, noise: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        """The mean square error of the noise; for learned variances plus the mean of `bound`, in which ε is constant.

        Args:
            model: predicts from (x_s, s, labels). data: (B, C, H, W). labels: (B,) or None.
            draw: generator for steps and noise; None: PyTorch's own.
            times, noise: given instead of drawn: (B,) in [0, 1), so that s = ⌊1,000 times⌋, and of data's shape.
        """
        times = torch.rand(len(data), generator=draw, device=data.device) if times is None else times
        if noise is None:
            noise = torch.randn(data.shape, generator=draw, device=data.device, dtype=data.dtype)
        steps = (times * STEPS).long().clamp(0, STEPS - 1)
        noisy = self.noised(data, noise, steps)
        out = model(noisy, steps.float(), labels, **self.model_options)
        if self.variance == "fixed":
            return (out - noise).square().mean()
        predicted, share = out.chunk(2, 1)
        error = (predicted - noise).square().mean()
        return error + self.bound(data, noisy, predicted.detach(), share, steps).mean()

    def bound(self, data: Tensor, noisy: Tensor, predicted: Tensor, share: Tensor, steps: Tensor) -> Tensor:
        """The terms (B,) of the variational bound at the given steps, in bits per value.

            s > 0:  KL(q(x_{s−1} | x_s, x) ‖ p(x_{s−1} | x_s)),   s = 0:  −log p(x | x_0) of values with 8 bits

        Args:
            data, noisy, predicted, share: x, x_s, the predictions of ε and of v, all (B, C, H, W). steps: s (B,).
        """
        keep, spread, from_data, from_noisy, log_beta, log_least = _chain(steps, data)
        mean = from_data * (noisy - spread * predicted) / keep + from_noisy * noisy
        true = from_data * data + from_noisy * noisy
        log_variance = log_least + (share + 1) / 2 * (log_beta - log_least)
        ratio = log_least - log_variance
        divergence = (ratio.exp() - ratio - 1 + (true - mean).square() * (-log_variance).exp()) / 2
        precision = (-log_variance / 2).exp()
        low, high = (data - mean - HALF_BIN) * precision, (data - mean + HALF_BIN) * precision
        below: Any = torch.special.ndtr if self.normal == "exact" else _tanh_normal
        lowest, highest = data < -LAST_BIN, data > LAST_BIN  # these bins have no other end
        likely = torch.where(lowest, below(high), torch.where(highest, below(-low), below(high) - below(low)))
        surprise = -likely.clamp_min(MIN_PROBABILITY).log()
        terms = torch.where(steps.view(-1, 1, 1, 1) == 0, surprise, divergence)
        return terms.flatten(1).mean(1) / math.log(2)

    def run(
        self, method: str, steps: int, predict: Callable[[Tensor, int], Tensor], x: Tensor,
        draws: Sequence[torch.Generator], spacing: str = "trailing",
    ) -> Tensor:  # fmt: skip
        """From noise (B, C, H, W) to images, by a scheduler of diffusers.

        Args:
            method: "ddpm", "ddim" or "dpm++". steps: evaluations of the model. "ddim" takes divisors of 1,000.
            predict: maps (x, s) to the model's prediction. draws: generators for the noise of "ddpm", one an image.
            spacing: of the steps of "ddim", see `Sampler`.
        Raises:
            OptionError: a number of steps that the chain does not have. MissingExtraError: diffusers is missing.
        """
        scheduler = self._scheduler(method, steps, spacing)
        noise = {"generator": list(draws)} if method == "ddpm" else {}
        channels = x.shape[1]
        for step in scheduler.timesteps.tolist():
            out = predict(x, step)
            if method != "ddpm":
                out = out[:, :channels]  # these leave the variance out
            x = scheduler.step(out, step, x, **noise).prev_sample
        return x

    def _scheduler(self, method: str, steps: int, spacing: str) -> Any:
        check_steps(method, steps)
        cure_torchvision()  # which diffusers imports
        with needs("diffusion"):
            import diffusers
        chain = {"num_train_timesteps": STEPS, "beta_start": BETA_LOW, "beta_end": BETA_HIGH,
                 "beta_schedule": "linear", "prediction_type": "epsilon"}  # fmt: skip
        scheduler: Any
        if method == "ddpm":
            kind = "learned_range" if self.variance == "learned" else "fixed_small"
            scheduler = diffusers.DDPMScheduler(
                **chain, variance_type=kind, clip_sample=False, timestep_spacing="linspace"
            )
        elif method == "ddim":
            scheduler = diffusers.DDIMScheduler(**chain, clip_sample=False, timestep_spacing=spacing)
        else:
            scheduler = diffusers.DPMSolverMultistepScheduler(**chain, use_lu_lambdas=True)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # diffusers turns tensors into arrays the old way
            scheduler.set_timesteps(steps)
        return scheduler


def _tanh_normal(x: Tensor) -> Tensor:
    """(1 + tanh(√(2 / π) (x + 0.044715 x³))) / 2, which is within 3e-4 of the standard normal distribution."""
    return (1 + (math.sqrt(2 / math.pi) * (x + 0.044715 * x**3)).tanh()) / 2


@cache
def _table() -> Tensor:
    """By step, in float64: √ᾱ, √(1 − ᾱ), the factors of x and of x_s in the posterior's mean, log β, log β̃ (6, 1000).

    β̃ is 0 at the first step; its logarithm is that of the second.
    """
    beta = torch.linspace(BETA_LOW, BETA_HIGH, STEPS, dtype=torch.float64)
    alpha_bar = (1 - beta).cumprod(0)
    before = torch.cat((torch.ones(1, dtype=torch.float64), alpha_bar[:-1]))
    least = beta * (1 - before) / (1 - alpha_bar)
    least[0] = least[1]
    from_data, from_noisy = before.sqrt() * beta / (1 - alpha_bar), (1 - beta).sqrt() * (1 - before) / (1 - alpha_bar)
    return torch.stack((alpha_bar.sqrt(), (1 - alpha_bar).sqrt(), from_data, from_noisy, beta.log(), least.log()))


def _chain(steps: Tensor, like: Tensor) -> Tensor:
    """The table's columns at steps (B,), as (6, B, 1, 1, 1)."""
    return _table().to(like)[:, steps].view(6, -1, 1, 1, 1)
