"""`polymix show`: what one mixer costs, next to what its paper publishes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from polymix._io import parse_options
from polymix.errors import PolymixError, check_int
from polymix.limits import LONGEST, check_memory
from polymix.measure import floor, interleaved
from polymix.measure.shapes import near_square
from polymix.measure.timing import Call
from polymix.mixers import PomMixer, TokenMixer, create_mixer
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
    """A table (quantity, here, in the paper) with its title, and its sources: the formula, and the paper's figures."""

    title: str
    rows: list[tuple[str, str, str]]
    sources: list[str]


_TABLE_6 = "PADRe, Table 6 (4,096 tokens, 192 channels; 2 operations per multiply-add)"
_TABLE_1A = "Poly-NL, Table 1a (14 × 14 × 1,024, reduction 4; multiply-adds)"
_PADRE: dict[str, Any] = {"preset": None}
# (mixer, options, channels, tokens, figure)
_PUBLISHED: list[tuple[str, dict[str, Any], int, int, Published]] = [
    ("padre", {**_PADRE, "degree": 2}, 192, 4096, Published("FLOPs", "1.10 G", _TABLE_6)),
    ("padre", {**_PADRE, "degree": 3}, 192, 4096, Published("FLOPs", "2.28 G", _TABLE_6)),
    ("padre", {**_PADRE, "degree": 4}, 192, 4096, Published("FLOPs", "3.27 G", _TABLE_6)),
    (
        "softmax", {}, 192, 4096,
        Published("FLOPs", "1.31 G", _TABLE_6, "a known misprint: the arithmetic gives 7.05 G multiply-adds"),
    ),
    ("poly_nl", {"reduction": 4}, 1024, 196, Published("FLOPs", "0.14 G", _TABLE_1A)),
    ("poly_nl", {"reduction": 4}, 1024, 196, Published("parameters", "0.7 M", _TABLE_1A)),
]  # fmt: skip


def show(name: str, options: Sequence[str]) -> Costs:
    """The costs of the mixer `name` with options such as "degree=3", "dim=192" and "n=4096"."""
    chosen = parse_options(options)
    dim, n = chosen.pop("dim", 192), chosen.pop("n", None)
    if n is not None:
        check_int("n", n, 1, LONGEST)
    mixer = create_mixer(name, dim, **chosen)
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
    sources = [f"multiply-adds by formula: {mixer.config.cost_formula}"]
    sources += [f"{it.value}: {it.source}{'; ' + it.note if it.note else ''}" for it in figures]
    return Costs(f"{mixer.name}, {dim} channels, {n:,} tokens", rows, sources)


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
    config = mixer.config.to_dict()
    config["preset"] = None if config["preset"] == "paper" else config["preset"]  # biases cost no multiply-adds
    figures = [
        figure
        for name, options, dim, tokens, figure in _PUBLISHED
        if (name, dim, tokens) == (config["name"], mixer.dim, n) and options.items() <= config.items()
    ]
    if isinstance(mixer, PomMixer):
        d, inner, k = mixer.dim, mixer.inner, mixer.config.degree
        count = 3 * n * d * inner + (k + 1) * n * inner
        figures.append(Published("multiplications", f"{count / 1e9:.3f} G", "PoM, Sec. 3.4: 3 n d D + (k + 1) n D"))
        source = "PoM, Eq. 11: fewer multiplications than attention from this length on"
        figures.append(Published("crossover", f"{mixer.crossover():,.0f} tokens", source))
    return figures
