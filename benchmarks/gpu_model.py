"""What the GPU kernels are compiled to, on a machine without a GPU, and the least time that published peaks allow.

    python benchmarks/gpu_model.py OUT [--cards A100,MI300X] [--tokens 4096] [--only pom,qt] [--launches FILE]

Every op, forward and backward, in float32 and bfloat16: each launch is caught and compiled for the card. Printed of an
op: its launches' registers, spills, shared memory, occupancy, and whether they use tensor cores; its bytes and
operations, counted in what the compiler made of them (`gpu_steps/counted.py`); and a bound in microseconds: the sum,
over the launches and PyTorch's own operations between them, of the longest of three: bytes over the card's bytes/s,
operations of products and others over its FLOP/s of their kind. A byte counts once per launch, however often it is
read. A bound is no time: nothing ran.

`--launches` compiles what `tests/benchmarks/launches.py` has written down, and counts nothing.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import torch
from gpu_steps.bench import DTYPES, Sizes
from gpu_steps.compiled import CARDS, Card, Launch, Pass, caught, compiled, read_launch
from gpu_steps.counted import Counts, counted
from gpu_steps.ops import CASES, PASSES, Case, call
from saving import save

from polymix.errors import check_choice
from polymix.measure import manifest

SIZES = Sizes()
UNITS = {"tf32": "tf32", "tf32x3": "tf32", "bf16": "bfloat16", "f16": "bfloat16"}  # of products; others are float32's


def launches_of(case: Case, dtype: str, pass_: str, tokens: int, amd: bool) -> tuple[list[Launch], list[Pass]]:
    """The launches of one op, and PyTorch's passes between them."""
    made = [
        part.requires_grad_()
        for part in case.make(
            lambda *shape: torch.randn(shape, dtype=getattr(torch, dtype)), 1, tokens, SIZES.dim, SIZES.heads
        )
    ]
    grad = None
    if pass_ == "training":
        with caught(amd):
            grad = torch.zeros_like(call(case, "forward", tokens, made)[0])
    with caught(amd) as (launches, passes):
        call(case, pass_, tokens, made, grad)
    return launches, passes


def least_seconds(counts: Counts, card: Card) -> dict[str, float]:
    """What the counts take at the card's peaks, each alone."""
    moved = counts.read + counts.written
    tensor = sum(flops / card.flops[UNITS.get(kind, "float32")] for kind, flops in counts.products.items())
    return {
        "memory": moved / card.bytes_per_second,
        "products": tensor,
        "others": counts.others / card.flops["float32"],
    }


def least_between(passes: list[Pass], card: Card) -> float:
    """What PyTorch's passes take at the card's peaks; its products of float32 are not in tf32."""
    return sum(
        max(one.bytes / card.bytes_per_second, one.flops / card.flops[one.dtype] if one.flops else 0.0)
        for one in passes
    )


@cache
def counts_of(text: str, numbers: tuple[tuple[str, float], ...], grid: tuple[int, ...]) -> Counts:
    """What is counted does not depend on the card, only on the form that the compiler gives it."""
    return counted(text, dict(numbers), grid)


def rows(name: str, dtype: str, pass_: str, tokens: int, cards: list[str]) -> list[dict[str, Any]]:
    """The launches of one op, compiled and counted for each card."""
    answer = []
    for card in cards:
        peak = CARDS[card]
        launches, passes = launches_of(CASES[name], dtype, pass_, tokens, peak.amd)
        kernels, bound = [], least_between(passes, peak)
        for launch in launches:
            code, text = compiled(launch, peak)
            counts = counts_of(text, tuple(launch.numbers.items()), launch.grid)
            least = least_seconds(counts, peak)
            bound += max(least.values())
            kernels.append({
                "kernel": launch.kernel.__name__, "programs": launch.grid, **asdict(code),
                "occupancy": code.occupancy(peak), "counts": asdict(counts),
                "bound_by": max(least, key=least.__getitem__),
            })  # fmt: skip
        answer.append({"op": name, "dtype": dtype, "pass": pass_, "tokens": tokens, "card": card,
                       "bytes_between": sum(one.bytes for one in passes),
                       "flops_between": sum(one.flops for one in passes),
                       "bound_seconds": bound, "kernels": kernels})  # fmt: skip
    return answer


def written_down(file: Path, cards: list[str]) -> list[dict[str, Any]]:
    """The launches of a file, each signature once, compiled for each card."""
    launches = {launch.key: launch for launch in map(read_launch, file.read_text(encoding="utf-8").splitlines())}
    answer = []
    for launch in launches.values():
        for card in cards:
            code = compiled(launch, CARDS[card])[0]
            answer.append({"kernel": launch.kernel.__name__, "launch": launch.key, "card": card, **asdict(code),
                           "occupancy": code.occupancy(CARDS[card])})  # fmt: skip
    return answer


def line(row: dict[str, Any]) -> str:
    worst = {key: max(kernel[key] for kernel in row["kernels"]) for key in ("registers", "spills", "shared")}
    occupancy = min(kernel["occupancy"] for kernel in row["kernels"])
    products = any(kernel["products"] for kernel in row["kernels"])
    moved = row["bytes_between"] + sum(k["counts"]["read"] + k["counts"]["written"] for k in row["kernels"])
    flops = sum(k["counts"]["others"] + sum(k["counts"]["products"].values()) for k in row["kernels"])
    flops += row["flops_between"]
    return (
        f"{row['op']:32} {row['dtype']:9} {row['pass']:9} {row['card']:6} {len(row['kernels'])} launches, "
        f"at most {worst['registers']} registers, {worst['spills']} spills, {worst['shared'] / 1024:.0f} KB shared; "
        f"{occupancy:.0%} of warps{'; tensor cores' if products else ''}; "
        f"{moved / 1e6:.1f} MB, {flops / 1e9:.2f} GFLOP; bound {1e6 * row['bound_seconds']:.1f} µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cards", default=",".join(CARDS), help=f"some of {','.join(CARDS)}")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", default="", help="ops whose names begin with one of these")
    parser.add_argument("--launches", type=Path)
    its = parser.parse_args()
    cards = its.cards.split(",")
    for card in cards:
        check_choice("--cards", card, CARDS)
    if its.launches:
        save({"machine": manifest("cpu", 1), "rows": written_down(its.launches, cards)}, its.out)
        return
    content: list[dict[str, Any]] = []
    for name in CASES:
        if name.startswith(tuple(its.only.split(","))):
            for dtype in DTYPES:
                for pass_ in PASSES:
                    content += rows(name, dtype, pass_, its.tokens, cards)
                    print(*map(line, content[-len(cards) :]), sep="\n", flush=True)
                    save({"machine": manifest("cpu", 1), "cards": {card: asdict(CARDS[card]) for card in cards},
                          "rows": content}, its.out)  # fmt: skip


if __name__ == "__main__":
    main()
