"""The options of flows, diffusion and samplers, checked without PyTorch."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from polymix.errors import OptionError, check_choice, check_int, check_number

FlowPath = Literal["linear", "gvp", "vp"]
Target = Literal["velocity", "noise", "score"]
Variance = Literal["learned", "fixed"]
Normal = Literal["exact", "tanh"]
DdimSpacing = Literal["trailing", "leading"]
PATHS, TARGETS, VARIANCES = get_args(FlowPath), get_args(Target), get_args(Variance)
NORMALS, SPACINGS = get_args(Normal), get_args(DdimSpacing)
SAMPLERS = ("euler", "heun", "dopri5", "euler_maruyama")  # of flows
SCHEDULERS = ("ddpm", "ddim", "dpm++")  # of diffusion
DIFFUSION_STEPS = 1000
TIME_MARGIN = 1e-3  # kept from a time at which a formula divides by zero
VP_MARGIN = 1e-5  # the same in the training on the path "vp"
# SiT's sizes: depth, dim and heads.
SIZES = {
    "S": {"depth": 12, "dim": 384, "heads": 6},
    "B": {"depth": 12, "dim": 768, "heads": 12},
    "L": {"depth": 24, "dim": 1024, "heads": 16},
    "XL": {"depth": 28, "dim": 1152, "heads": 16},
}
# The methods that read an option; the others take its default alone.
_READERS = {"diffusion": "euler_maruyama", "last_step": "euler_maruyama", "rtol": "dopri5", "atol": "dopri5",
            "spacing": "ddim"}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """The options of a `Sampler`, which explains them.

    Raises OptionError: an option is out of range, or has no effect with the method.
    """

    method: str = "heun"
    steps: int = 50
    guidance: float = 1.0
    guidance_channels: int | None = None
    guidance_interval: tuple[float, float] = (0.0, 1.0)
    diffusion: float = 1.0
    last_step: float = 0.04
    rtol: float = 1e-3
    atol: float = 1e-6
    spacing: str = "trailing"

    def __post_init__(self) -> None:
        check_choice("method", self.method, (*SAMPLERS, *SCHEDULERS))
        check_int("steps", self.steps, 2 if self.method == "euler_maruyama" else 1)
        check_choice("spacing", self.spacing, SPACINGS)
        check_number("guidance", self.guidance, 0.0, math.inf, "a number of at least 0", 4)
        if self.guidance_channels is not None:
            check_int("guidance_channels", self.guidance_channels, 1)
        interval = self.guidance_interval
        if len(interval) != 2 or not 0 <= interval[0] < interval[1] <= 1:
            raise OptionError("guidance_interval", repr(interval), "two increasing times in [0, 1]", "Use (0, 1).")
        check_number("diffusion", self.diffusion, 0.0, math.inf, "a number of at least 0", 1)
        allowed = f"a length in [{TIME_MARGIN}, 1)"
        check_number("last_step", self.last_step, TIME_MARGIN, 1.0, allowed, 0.04)
        for name, value in (("rtol", self.rtol), ("atol", self.atol)):
            check_number(name, value, 1e-12, 1.0, "a tolerance in [1e-12, 1)", 1e-3)
        for name, method in _READERS.items():
            if method != self.method and getattr(self, name) != getattr(SamplerSettings, name):
                cure = f"Use method={method!r}, or leave it out."
                raise OptionError(name, f"a value with method={self.method!r}", "none, as it has no effect", cure)
        if self.method == "dopri5" and self.steps != SamplerSettings.steps:
            cure = "Leave steps out, or set rtol and atol."
            raise OptionError("steps", "a value with method='dopri5'", "none, as it has no effect", cure)
        if self.method in SCHEDULERS:
            check_steps(self.method, self.steps)
        if self.guidance == 1 and (self.guidance_channels is not None or tuple(interval) != (0.0, 1.0)):
            name = "guidance_interval" if self.guidance_channels is None else "guidance_channels"
            raise OptionError(name, "a value with guidance=1", "none, as it has no effect", "Set guidance=4.")

    @property
    def words(self) -> str:
        """The method and what else decides an image: "heun, 25 steps, guidance 4"."""
        words = [self.method] if self.method == "dopri5" else [self.method, f"{self.steps} steps"]
        if self.guidance != 1:
            words.append(f"guidance {self.guidance:g}")
            if self.guidance_channels is not None:
                words.append(f"of {self.guidance_channels} channels")
            if tuple(self.guidance_interval) != (0.0, 1.0):
                words.append("at t from {:g} to {:g}".format(*self.guidance_interval))
        return ", ".join(words)


def check_steps(method: str, steps: int) -> None:
    """Raise OptionError for a number of steps that a scheduler cannot take."""
    check_choice("method", method, SCHEDULERS)
    if steps > DIFFUSION_STEPS or (method == "ddim" and DIFFUSION_STEPS % steps):
        count = f"{DIFFUSION_STEPS:,}"
        allowed = f"a divisor of {count}" if method == "ddim" else f"at most {count}"
        raise OptionError("steps", f"{steps} with method={method!r}", allowed, "Use 50.")
