"""Which implementation is fastest on few tokens, and which "auto" takes: 16 to 512 tokens, batches of 1 to 64.

    python benchmarks/small_inputs.py benchmarks/results/small-inputs.json [--only qt,pom] [--threads 2] [--dim 192]
        [--clock processor --threads 1]

Forward (without gradients) and training step (forward and backward), float32 or --dtype bfloat16. The
implementations of a cell are timed in turn. Cells that the file has are kept, so a run can be done in parts.
"""

import argparse
import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saving import save
from torch import nn

from polymix.convert.tracing import Cotangents
from polymix.errors import CapabilityError
from polymix.measure import manifest
from polymix.measure.clock import CLOCKS, Clock, check_clock
from polymix.measure.timing import interleaved_within
from polymix.mixers.spec import parse_mixer
from polymix.ops.dispatch import recording

COTANGENTS = Cotangents()
MIXERS = ("padre", "pom", "qt", "poly_sa", "poly_nl")
TOKENS, BATCHES = (16, 32, 64, 128, 196, 256, 512), (1, 4, 16, 64)
IMPLS = ("eager", "blocked", "native")
MOST = 1 << 14  # tokens in a batch: above, no input is small


def forward(mixer: nn.Module, x: torch.Tensor) -> None:
    with torch.inference_mode():
        mixer(x)


def training(mixer: nn.Module, x: torch.Tensor) -> None:
    mixer.zero_grad()
    y = mixer(x)
    y.backward(COTANGENTS(y))


def cell(
    name: str, dim: int, tokens: int, batch: int, dtype: torch.dtype, trains: bool, seconds: float, clock: Clock
) -> dict[str, Any]:
    """The median time of each implementation in µs, and what "auto" takes."""
    side = math.isqrt(tokens)
    grid = (side, side) if side**2 == tokens else (tokens,)
    x, run, calls, taken = torch.randn(batch, tokens, dim, dtype=dtype), training if trains else forward, {}, ""
    for impl in ("auto", *IMPLS):
        mixer = parse_mixer(f"{name}:impl={impl}")[1].for_grid(grid).build(dim).to(dtype).train(trains)
        try:
            with recording() as choices:
                run(mixer, x)
        except CapabilityError:  # blocked has no backward
            continue
        if impl == "auto":
            taken = choices[0].impl
        else:
            calls[impl] = partial(run, mixer, x)
    times = {impl: timing.median * 1e6 for impl, timing in interleaved_within(calls, seconds, "cpu", clock).items()}
    return {"clock": clock, "us": times, "auto": taken, "auto_over_fastest": times[taken] / min(times.values())}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--only", default=",".join(MIXERS))
    parser.add_argument("--dim", type=int, default=192)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--seconds", type=float, default=0.3, help="per cell")
    parser.add_argument(
        "--clock", choices=CLOCKS, default="wall", help="processor: beside other work, with --threads 1"
    )
    options = parser.parse_args()
    check_clock(options.clock, threads=options.threads)
    torch.set_num_threads(options.threads)
    rows = json.loads(options.out.read_text())["rows"] if options.out.exists() else []
    known = {tuple(row["case"]) for row in rows}
    for name in options.only.split(","):
        for trains in (False, True):
            for tokens in TOKENS:
                for batch in BATCHES:
                    case = (
                        name,
                        options.dtype,
                        options.threads,
                        options.dim,
                        "training" if trains else "forward",
                        tokens,
                        batch,
                    )
                    if case in known or tokens * batch > MOST:
                        continue
                    dtype = getattr(torch, options.dtype)
                    row = {
                        "case": case,
                        **cell(name, options.dim, tokens, batch, dtype, trains, options.seconds, options.clock),
                    }
                    rows.append(row)
                    times = "  ".join(f"{impl} {us:.0f}" for impl, us in row["us"].items())
                    print(*case, f" {times} µs; auto: {row['auto']}, {row['auto_over_fastest']:.2f}", flush=True)
            save({"machine": manifest("cpu", options.threads), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
