"""What the GPU kernels are compiled to, on a machine without a GPU, and the least time that published peaks allow.

    python benchmarks/gpu_model.py OUT [--cards A100,H100] [--tokens 4096] [--only pom,qt]

Every op, forward and backward, in float32 and bfloat16: each launch is caught and compiled for the card. Printed of an
op: its kernels' registers, spills, shared memory, occupancy, the width of their loads and whether they use tensor
cores; and a bound in microseconds: the op's bytes over the card's bytes/s, or its operations over its FLOP/s, whichever
is longer. A bound is no time: nothing ran.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from gpu_steps.bench import DTYPES, Sizes
from gpu_steps.compiled import CARDS, Launch, caught, compiled
from gpu_steps.ops import CASES, PASSES, Case, bytes_of, call
from saving import save

from polymix.errors import check_choice
from polymix.measure import manifest

SIZES = Sizes()


def launches_of(case: Case, dtype: str, pass_: str, tokens: int, amd: bool) -> tuple[list[Launch], int]:
    """The launches of one op, and its bytes."""
    made = [
        part.requires_grad_()
        for part in case.make(
            lambda *shape: torch.randn(shape, dtype=getattr(torch, dtype)), 1, tokens, SIZES.dim, SIZES.heads
        )
    ]
    with caught(amd) as launches:
        out = call(case, "forward", tokens, made)[0]
        grad = None if pass_ == "forward" else torch.zeros_like(out)
        call(case, pass_, tokens, made, grad)
    return launches, bytes_of(made, out, pass_)


def rows(name: str, dtype: str, pass_: str, tokens: int, cards: list[str]) -> list[dict[str, Any]]:
    """The launches of one op, compiled for each card."""
    case, answer = CASES[name], []
    flops = tokens * case.flops(SIZES.dim, SIZES.heads) * (1 if pass_ == "forward" else 3)
    unit = "tf32" if case.tensor_cores and dtype != "float32" else "float32"
    for card in cards:
        peak = CARDS[card]
        launches, moved = launches_of(case, dtype, pass_, tokens, peak.amd)
        bound = max(moved / peak.bytes_per_second, flops / peak.flops[unit])
        kernels = []
        for launch in launches:
            code = compiled(launch, peak)
            kernels.append({
                "kernel": launch.kernel.__name__, "programs": launch.grid, **asdict(code),
                "occupancy": code.occupancy(peak),
            })  # fmt: skip
        answer.append({"op": name, "dtype": dtype, "pass": pass_, "tokens": tokens, "card": card,
                       "bound_seconds": bound, "kernels": kernels})  # fmt: skip
    return answer


def line(row: dict[str, Any]) -> str:
    worst = {key: max(kernel[key] for kernel in row["kernels"]) for key in ("registers", "spills", "shared")}
    occupancy = min(kernel["occupancy"] for kernel in row["kernels"])
    products = any(kernel["products"] for kernel in row["kernels"])
    return (
        f"{row['op']:20} {row['dtype']:9} {row['pass']:9} {row['card']:6} {len(row['kernels'])} kernels, at most "
        f"{worst['registers']} registers, {worst['spills']} spills, {worst['shared'] / 1024:.0f} KB shared; "
        f"{occupancy:.0%} of warps{'; tensor cores' if products else ''}; bound {1e6 * row['bound_seconds']:.1f} µs"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--cards", default=",".join(CARDS))
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--only", default="", help="ops whose names begin with one of these")
    its = parser.parse_args()
    cards = its.cards.split(",")
    for card in cards:
        check_choice("--cards", card, CARDS)
    content: list[dict[str, Any]] = []
    for name in CASES:
        if name.startswith(tuple(its.only.split(","))):
            for dtype in DTYPES:
                for pass_ in PASSES:
                    content += rows(name, dtype, pass_, its.tokens, cards)
                    print(*map(line, content[-len(cards) :]), sep="\n", flush=True)
                    save({"machine": manifest("cpu", 1), "rows": content}, its.out)


if __name__ == "__main__":
    main()
