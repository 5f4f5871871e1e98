"""Mixers over a sweep of token counts: latency, peak memory, ratio to attention and to the floor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from polymix.bench.floor import floor
from polymix.bench.measure import interleaved, once, peak_memory
from polymix.mixers import MixerConfig, TokenMixer
from polymix.models import fit_to_grid

# (config, grid) -> a module, its input, and the mixers in it whose products and convolutions are the floor's
Maker = Callable[[MixerConfig, tuple[int, int]], tuple[nn.Module, torch.Tensor]]


@dataclass(frozen=True)
class Budget:
    """What a mixer may take at one token count before it is stopped: seconds a call, bytes held at once."""

    seconds: float = 10.0
    bytes: int = 4 << 30
    timing_seconds: float = 0.4  # for all rounds of one mixer at one token count


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

    def make(config: MixerConfig, grid: tuple[int, int]) -> tuple[nn.Module, torch.Tensor]:
        mixer = fit_to_grid(with_heads(config, heads), grid).build(dim, device=device, dtype=dtype)
        return mixer, torch.randn(1, grid[0] * grid[1], dim, device=device, dtype=dtype)

    return make


def with_heads(config: MixerConfig, heads: int) -> MixerConfig:
    """The config with `heads`, where it has heads and leaves their number open."""
    return config.changed(heads=heads) if getattr(config, "heads", 1) is None else config


def _failed_check(module: nn.Module, x: torch.Tensor) -> str | None:
    """No number for code that computes wrong: the outputs must be finite and agree with the same module in float64."""
    wide = module.to("cpu", torch.float64)(x.to("cpu", torch.float64))
    narrow = module.to(x.device, x.dtype)(x).to("cpu", torch.float64)
    error = ((narrow - wide).abs().max() / wide.abs().max().clamp_min(1e-30)).item()
    limit = 1e-4 if x.dtype == torch.float32 else 0.1
    return None if error <= limit else f"differs from float64 by {error:.1e} of its largest output (limit {limit:.0e})"


@torch.inference_mode()
def sweep(
    mixers: Mapping[str, MixerConfig],
    tokens: list[int],
    make: Maker,
    *,
    scope: str,
    budget: Budget,
    device: str = "cpu",
    done: Mapping[tuple[str, int], str | None] = {},  # noqa: B006
) -> Iterator[list[Row]]:
    """Measure every mixer at every token count, the counts in order, the mixers in turn within one.

    A mixer that passes the budget, or whose next count by its growth so far would, is stopped there and the row says
    so; a larger count is then not tried. `done` holds what an earlier run finished: (mixer, tokens) -> why it stopped.

    Yields:
        the rows of one token count.
    """
    stopped: dict[str, str] = {}
    last: dict[str, tuple[int, float]] = {}
    for n in sorted(tokens):
        grid = near_square(n)
        calls: dict[str, Callable[[], Any]] = {}
        memory: dict[str, int] = {}
        flops: dict[str, int] = {}
        rows: list[Row] = []
        for name, config in mixers.items():
            if (name, n) in done:
                if reason := done[name, n]:
                    stopped[name] = reason
                continue
            if name not in stopped and name in last:
                before, seconds = last[name]
                expected = seconds * (n / before) ** 2
                if expected > 4 * budget.seconds:  # quadratic growth is the worst there is; 4 allows for less
                    stopped[name] = f"would take about {expected:.0f} s at {n:,} tokens (budget {budget.seconds:g} s)"
            if name not in stopped:
                reason = _prepare(name, config, grid, make, budget, device, n == min(tokens), calls, memory, flops, last, n)
                if reason:
                    stopped[name] = reason
            if name in stopped:
                rows.append(Row(name, scope, n, stopped=stopped[name]))
        if not calls:
            if rows:
                yield rows
            continue
        timings = interleaved(calls, seconds=budget.timing_seconds, device=device)
        for name in mixers:
            if name in timings:
                t, base = timings[name], timings.get(f"{name} floor")
                rows.append(
                    Row(
                        name, scope, n, t.median * 1e3, t.low * 1e3, t.high * 1e3, tuple(run * 1e3 for run in t.runs),
                        memory[name], base.median * 1e3 if base else None, flops[name],
                    )  # fmt: skip
                )
        yield rows


def _prepare(
    name: str, config: MixerConfig, grid: tuple[int, int], make: Maker, budget: Budget, device: str, first: bool,
    calls: dict[str, Callable[[], Any]], memory: dict[str, int], flops: dict[str, int],
    last: dict[str, tuple[int, float]], n: int,
) -> str | None:  # fmt: skip
    """Put the calls of one mixer (and of its floor, alone) among `calls`, or say why it is stopped."""
    try:
        module, x = make(config, grid)
        module.eval()
        if first and (wrong := _failed_check(module, x)):
            return f"failed its check: {wrong}"
        seconds = once(lambda: module(x), device)
        if seconds > budget.seconds:
            return f"took {seconds:.1f} s at {n:,} tokens (budget {budget.seconds:g} s)"
        memory[name] = peak_memory(lambda: module(x), device)
    except (MemoryError, torch.OutOfMemoryError, RuntimeError) as error:
        if isinstance(error, RuntimeError) and "memory" not in str(error).lower():
            raise
        return f"ran out of memory at {n:,} tokens"
    if memory[name] > budget.bytes:
        return f"held {memory[name] / 2**30:.1f} GiB at {n:,} tokens (budget {budget.bytes / 2**30:g} GiB)"
    last[name] = n, seconds
    calls[name] = lambda: module(x)
    if isinstance(module, TokenMixer):
        cost = module.cost(n, dtype=x.dtype)
        flops[name] = cost.flops
        calls[f"{name} floor"] = floor(cost, device=device, dtype=x.dtype)
    else:
        inner = [part for part in module.modules() if isinstance(part, TokenMixer)]
        flops[name] = sum(part.cost(n).flops for part in inner)
    return None
