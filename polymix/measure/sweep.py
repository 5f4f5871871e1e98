"""Mixers over a sweep of token counts: latency, peak memory, ratio to attention and to the floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from polymix.measure.floor import floor
from polymix.measure.timing import interleaved, once, peak_memory
from polymix.mixers import MixerConfig, TokenMixer

# (config, grid) -> a module, an input for it, and options of the call
Maker = Callable[[MixerConfig, tuple[int, int]], tuple[nn.Module, torch.Tensor, dict[str, Any]]]


@dataclass(frozen=True)
class Budget:
    """What a mixer may take at one token count before it is stopped: seconds a call, bytes held at once."""

    seconds: float = 10.0
    bytes: int = 4 << 30
    timing_seconds: float = 0.4  # for all rounds of one mixer at one token count

    def foresee(self, n: int, last: tuple[int, float] | None) -> None:
        """Stop before a call that is sure to pass the budget: four times over, if its time grows quadratically."""
        if last is not None and last[1] * (n / last[0]) ** 2 > 4 * self.seconds:
            expected = last[1] * (n / last[0]) ** 2
            raise Stopped(f"would take up to {expected:.2g} s at {n:,} tokens (budget {self.seconds:g} s)")

    def hold(self, n: int, seconds: float = 0.0, peak: int = 0) -> None:
        """Stop after a call that took or held too much."""
        if seconds > self.seconds:
            raise Stopped(f"took {seconds:.2g} s at {n:,} tokens (budget {self.seconds:g} s)")
        if peak > self.bytes:
            raise Stopped(f"held {peak / 2**30:.1f} GiB at {n:,} tokens (budget {self.bytes / 2**30:g} GiB)")


@dataclass(frozen=True)
class Row:
    """One mixer at one token count. Latencies in milliseconds, memory in bytes; `stopped` says why there are none."""

    mixer: str
    scope: str  # "alone" or "host"
    tokens: int
    latency: float | None = None
    low: float | None = None
    high: float | None = None
    runs: tuple[float, ...] = ()
    peak_bytes: int | None = None
    floor: float | None = None
    flops: int | None = None
    stopped: str | None = None

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


def near_square(n: int) -> tuple[int, int]:
    """(H, W) with H · W = n, as square as n allows."""
    height = next(h for h in range(math.isqrt(n), 0, -1) if n % h == 0)
    return height, n // height


def alone(dim: int, heads: int, device: str, dtype: torch.dtype) -> Maker:
    """The mixer by itself, batch 1."""

    def make(config: MixerConfig, grid: tuple[int, int]) -> tuple[nn.Module, torch.Tensor, dict[str, Any]]:
        mixer = config.for_heads(heads).for_grid(grid).build(dim, device=device, dtype=dtype)
        return mixer, torch.randn(1, grid[0] * grid[1], dim, device=device, dtype=dtype), config.call_options(grid)

    return make


class Stopped(Exception):
    """Why a mixer is measured no further."""


@dataclass(frozen=True)
class _Ready:
    """A mixer at one token count, ready to be timed."""

    call: Callable[[], Any]
    floor: Callable[[], Any] | None  # of a mixer alone
    seconds: float  # of its first call
    peak_bytes: int
    flops: int


@torch.inference_mode()
def sweep(
    mixers: Mapping[str, MixerConfig],
    tokens: Sequence[int],
    make: Maker,
    *,
    scope: str,
    budget: Budget,
    device: str = "cpu",
    done: Mapping[tuple[str, int], str | None] | None = None,
) -> Iterator[list[Row]]:
    """Measure every mixer at every token count, the counts in order, the mixers in turn within one.

    A mixer that computes wrong, that passes the budget, or whose next count would if it grew quadratically, is stopped
    there and its rows say so. `done` holds what an earlier run finished: (mixer, tokens) -> why it stopped, or None.

    Yields:
        the new rows of one token count.
    """
    done = done or {}
    stopped: dict[str, str] = {}
    last: dict[str, tuple[int, float]] = {}
    for n in sorted(tokens):
        ready: dict[str, _Ready] = {}
        rows: list[Row] = []
        for name, config in mixers.items():
            if (name, n) in done:
                if reason := done[name, n]:
                    stopped[name] = reason
                continue
            try:
                if name in stopped:
                    raise Stopped(stopped[name])
                budget.foresee(n, last.get(name))
                ready[name] = _prepare(config, n, make, budget, device, check=n == min(tokens))
                last[name] = n, ready[name].seconds
            except Stopped as why:
                stopped[name] = str(why)
                rows.append(Row(name, scope, n, stopped=str(why)))
        rows += _time(ready, scope, n, budget, device)
        if rows:
            yield rows


def _prepare(config: MixerConfig, n: int, make: Maker, budget: Budget, device: str, *, check: bool) -> _Ready:
    """Build the module, check it, and hold one call against the budget."""
    try:
        module, x, options = make(config, near_square(n))
        call = partial(module.eval(), x, **options)
        if check:
            _check(module, x, options)
        seconds = once(call, device)
        budget.hold(n, seconds)
        peak = peak_memory(call, device)
    except (MemoryError, RuntimeError) as error:  # PyTorch's CPU allocator raises a plain RuntimeError
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        raise Stopped(f"ran out of memory at {n:,} tokens") from error
    budget.hold(n, peak=peak)
    if isinstance(module, TokenMixer):
        cost = module.cost(n, dtype=x.dtype)
        return _Ready(call, floor(cost, device=device, dtype=x.dtype), seconds, peak, cost.flops)
    inner = sum(part.cost(n).flops for part in module.modules() if isinstance(part, TokenMixer))
    return _Ready(call, None, seconds, peak, inner)


def _check(module: nn.Module, x: torch.Tensor, options: dict[str, Any]) -> None:
    """No number for code that computes wrong: the output must agree with that of the same module in float64."""
    wide = module.to("cpu", torch.float64)(x.to("cpu", torch.float64), **options)
    if reason := disagreement(module.to(x.device, x.dtype)(x, **options), wide):
        raise Stopped(reason)


def disagreement(narrow: torch.Tensor, wide: torch.Tensor) -> str | None:
    """Why `narrow` is no rounding of `wide`, its float64; None where it is."""
    error = ((narrow.to("cpu", torch.float64) - wide).abs().max() / wide.abs().max().clamp_min(1e-30)).item()
    limit = 1e-4 if narrow.dtype == torch.float32 else 0.1
    if error <= limit:  # NaN is not
        return None
    return f"failed its check: off float64 by {error:.1e} of its largest output (limit {limit:.0e})"


def _time(ready: Mapping[str, _Ready], scope: str, n: int, budget: Budget, device: str) -> list[Row]:
    calls = {(name, False): mixer.call for name, mixer in ready.items()}
    calls |= {(name, True): mixer.floor for name, mixer in ready.items() if mixer.floor is not None}
    timings = interleaved(calls, seconds=budget.timing_seconds, device=device)
    rows = []
    for name, mixer in ready.items():
        timing, bare = timings[name, False].milliseconds(), timings.get((name, True))
        rows.append(
            Row(
                name,
                scope,
                n,
                latency=timing.median,
                low=timing.low,
                high=timing.high,
                runs=timing.runs,
                peak_bytes=mixer.peak_bytes,
                floor=bare.milliseconds().median if bare else None,
                flops=mixer.flops,
            )
        )
    return rows
