"""`polymix show`: what one mixer costs, next to what its paper publishes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from polymix.errors import PolymixError, check_int
from polymix.limits import LONGEST, check_memory
from polymix.measure import interleaved
from polymix.measure.floor import floor
from polymix.measure.machine import busy
from polymix.measure.shapes import near_square
from polymix.measure.timing import Call
from polymix.mixers import PomMixer, TokenMixer
from polymix.mixers.config import GridConfig
from polymix.mixers.registry import Capabilities
from polymix.mixers.spec import parse_mixer, parse_words
from polymix.numbers import figure, plural


@dataclass(frozen=True)
class Published:
    """One figure of a paper: where it stands, and what to know about it."""

    quantity: str
    value: str
    source: str
    note: str = ""


@dataclass(frozen=True)
class Costs:
    """A table (quantity, here, in the paper) with its title, its sources, and the mixer's options with their values.

    sources: sentences: what the mixer can do, the formula of its cost, the paper's figures, and a busy machine.
    printed: what the papers print of models whose mixer has these options.
    """

    title: str
    rows: list[tuple[str, str, str]]
    sources: list[str]
    options: dict[str, str]
    printed: list[str]


_IMAGE = (64, 64)  # of the paper's figures: rows and columns of tokens
# How a figure of published.toml is shown: beside which quantity, and its unit.
_FIGURES = {
    "flops_G": ("FLOPs", "{:.2f} G"), "multiply_adds_G": ("multiplications", "{:.2f} G"),
    "parameters_M": ("parameters", "{:.1f} M"), "peak_MB": ("peak memory of one layer", "{:g} MB"),
    "a100_ms": ("latency on an A100", "{:g} ms"), "hexagon_int8_ms": ("latency on a Hexagon NPU in int8", "{:g} ms"),
}  # fmt: skip


def show(name: str, options: Sequence[str]) -> Costs:
    """The costs of the mixer `name`, as `parse_mixer` reads it, with words such as "degree=3", "dim=192", "n=4096"."""
    from polymix.train.published import lines, of_mixer

    config, sizes = parse_words(name, options, ("dim", "n"))
    dim, n = sizes.get("dim", 192), sizes.get("n")
    if n is not None:
        check_int("n", n, 1, LONGEST)
    elif 2 in config.mixer.capabilities.grids and isinstance(config, GridConfig) and config.placed:
        config = config if config.grid else config.changed(grid=_IMAGE)
    mixer = config.build(dim)
    if n is None:
        grid = mixer.config.built_grid
        n = math.prod(grid) + mixer.config.prefix if grid else 4096
    check_int("n", n, 1, LONGEST)
    check_memory("n", f"{n:,} tokens of {dim:,} channels", 3 * 4 * n * dim)
    cost = mixer.cost(n)
    check_memory("n", f"the floor of {n:,} tokens of {dim:,} channels", cost.bytes)
    times = interleaved({"floor": floor(cost), **_own_call(mixer, n)}, seconds=0.5)
    own = times["mixer"].median if "mixer" in times else math.inf
    least = min(times["floor"].median, own)  # the mixer runs the same products
    threads = plural(torch.get_num_threads(), "thread")
    here = [
        ("parameters", f"{cost.parameters:,}", "parameters"),
        ("multiply-adds", f"{cost.multiply_adds / 1e9:.3f} G", "multiplications"),
        ("FLOPs (2 per multiply-add)", f"{cost.flops / 1e9:.3f} G", "FLOPs"),
        ("bytes moved, float32", f"{cost.bytes / 2**20:.1f} MiB", "bytes"),
        (f"floor, {threads}", figure(1e3 * least, " ms"), "latency"),
    ]
    here += [] if math.isinf(own) else [(f"one call, {threads}", figure(1e3 * own, " ms"), "")]
    figures = published(mixer, n)
    rows = [
        (label, value, ", ".join(it.value for it in figures if it.quantity == quantity))
        for label, value, quantity in here
    ]
    shown = {quantity for _, _, quantity in here}
    rows += [(it.quantity, "", it.value) for it in figures if it.quantity not in shown]
    sources = [sentence for sentence in (busy(),) if sentence]
    sources += [f"Multiply-adds of N tokens with D channels: {mixer.config.cost_formula}."]
    if " D d" in mixer.config.cost_formula:
        sources += ["d: the channels that an output of a channel map reads, D where it is dense."]
    printed: dict[str, list[str]] = {}
    for it in figures:
        printed.setdefault(f"{it.source}{'; ' + it.note if it.note else ''}", []).append(it.value)
    sources += [f"{', '.join(values)}: {source.rstrip('.')}." for source, values in printed.items()]
    sources += [f"Can do: {able(config.mixer.capabilities)}."]
    grid = mixer.config.built_grid
    sides = f", {' × '.join(f'{side:,}' for side in grid)}" if grid and len(grid) > 1 else ""
    values = {f.name: written(getattr(mixer.config, f.name)) for f in fields(mixer.config)}
    title = f"{mixer.name}, {dim} channels, {n:,} tokens{sides}"
    return Costs(title, rows, sources, values, lines(of_mixer(mixer.config)))


def able(can: Capabilities) -> str:
    """What a mixer can do, with suitable options, in words."""
    words = {
        "causal": "causal", "recurrent": "recurrent (a state of fixed size)", "cross": "cross (reads a context)",
        "keys": "queries, keys and values from inputs of their own", "any_length": "any length with the same weights",
    }  # fmt: skip
    parts = [text for name, text in words.items() if getattr(can, name)]
    parts += [f"grids of {'/'.join(map(str, can.grids))}-D"] if can.grids else []
    return ", ".join([*parts, *([f"masks: {', '.join(sorted(can.masks))}"] if can.masks else [])]) or "one length"


def written(value: Any) -> str:
    """An option's value as one would type it, with short numbers."""
    if isinstance(value, (tuple, list)):
        return ",".join(map(written, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _own_call(mixer: TokenMixer, n: int) -> dict[str, Call]:
    """A call of the mixer itself, by the name "mixer"; nothing for one that cannot be called with tokens alone."""
    mixer.eval()
    x, prefix = torch.randn(1, n, mixer.dim), mixer.config.prefix
    options = mixer.config.call_options(mixer.config.built_grid or near_square(n - prefix)) if n > prefix else {}

    def call() -> None:
        with torch.inference_mode():
            mixer(x, **options)

    try:
        call()
    except PolymixError:
        return {}
    return {"mixer": call}


def published(mixer: TokenMixer, n: int) -> list[Published]:
    """The papers' figures for a mixer with these options, channels and tokens."""
    from polymix.train.published import layers

    own = replace(mixer.config.unnamed.for_heads(getattr(mixer, "heads", 1)).without_grid(), impl="auto")
    figures = []
    for row in layers(channels=mixer.dim, tokens=n):
        if parse_mixer(row.mixer)[1] == own:
            source = f"{row.paper}, {row.table} ({n:,} tokens, {mixer.dim:,} channels)"
            for name, value in row.figures.items():
                quantity, unit = _FIGURES[name]
                figures.append(Published(quantity, unit.format(value), source, row.note))
    if isinstance(mixer, PomMixer):
        d, inner, k = mixer.dim, mixer.inner, mixer.config.degree
        count = 3 * n * d * inner + (k + 1) * n * inner
        figures.append(Published("multiplications", f"{count / 1e9:.3f} G", "PoM, Sec. 3.4: 3 n d D + (k + 1) n D"))
        source = "PoM, Eq. 11: fewer multiplications than attention from this length on"
        figures.append(Published("crossover", f"{mixer.crossover():,.0f} tokens", source))
    return figures
