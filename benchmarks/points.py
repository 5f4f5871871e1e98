"""A mixer along a curve through a cloud: time and memory by the number of points and the window, attention and mixers.

    python benchmarks/points.py benchmarks/results/points.json

One layer of PTv3's finest decoder stage (64 channels, 4 heads) over one cloud, without gradients; its points are in the
order of the curve already. A window of 0 is the whole cloud. Memory is the most that PyTorch's allocations hold at
once, beyond input and weights. A cell is left out if it would take more than --longest seconds: its time is foretold
from the last one, as the square of the points for attention over whole clouds, and in proportion otherwise. One that
would take more than 5 seconds is timed once.

Then the same points as one cloud and as many, each whole, without gradients and with a backward pass; and how many
voxels a second each curve puts in order. Both by one thread's processor time, which other work on the machine hardly
changes. --only-clouds leaves the first part as the file has it.
"""

import argparse
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from saving import save

from polymix.convert.tracing import Cotangents
from polymix.domains.segment3d.along import AlongCurve
from polymix.domains.segment3d.curves import hilbert, z_order
from polymix.measure import manifest, peak_memory, repeated
from polymix.mixers.spec import parse_mixer

MIXERS = ("softmax", "pom", "qt", "linear", "poly_nl", "padre")
SPLIT = 96_000  # points that are one cloud or many
LONG = 5.0  # seconds of a call that is timed once
POINTS, WINDOWS = (10_000, 100_000, 1_000_000), (1024, 4096, 0)


def split(name: str, points: int, clouds: int, dim: int, heads: int, rounds: int) -> dict[str, Any]:
    """Seconds over whole clouds of one size, forward alone, and forward and backward."""
    torch.manual_seed(0)
    layer = AlongCurve(dim, parse_mixer(name)[1].for_heads(heads), None)
    x, order, lengths = torch.randn(points, dim, requires_grad=True), torch.arange(points), [points // clouds] * clouds

    cotangents = Cotangents()

    def step() -> None:
        y = layer(x, order, lengths)
        y.backward(cotangents(y))

    def forward() -> None:
        with torch.inference_mode():
            layer(x, order, lengths)

    row: dict[str, Any] = {"mixer": name, "points": points, "clouds": clouds, "clock": "processor"}
    for key, call in (("seconds", forward), ("step_seconds", step)):
        row[key] = repeated(call, least=rounds, most=rounds, warm_up=1, clock="processor").median
    return row


def curve_speeds(points: int, rounds: int) -> dict[str, float]:
    """Voxels a second, in millions, for random voxels of 16 bits a side."""
    grid = torch.randint(0, 1 << 16, (points, 3))
    speeds = {}
    for name, curve in (("z_order", z_order), ("hilbert", hilbert)):
        timing = repeated(partial(curve, grid), least=rounds, most=rounds, warm_up=1, clock="processor")
        speeds[name] = points / 1e6 / timing.median
    return speeds


def cell(name: str, points: int, window: int, dim: int, heads: int, rounds: int) -> dict[str, Any]:
    """Seconds of a call, the median of some after a warm-up, and the bytes that it holds."""
    torch.manual_seed(0)
    layer = AlongCurve(dim, parse_mixer(name)[1].for_heads(heads), window or None).eval()
    x, order = torch.randn(points, dim), torch.arange(points)
    with torch.inference_mode():
        peak = peak_memory(lambda: layer(x, order, [points]))  # which warms up
        timing = repeated(lambda: layer(x, order, [points]), least=rounds, most=rounds)
    return {"seconds": timing.median, "clock": timing.clock, "peak_bytes": peak}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--mixers", default=",".join(MIXERS))
    parser.add_argument("--points", default=",".join(map(str, POINTS)))
    parser.add_argument("--windows", default=",".join(map(str, WINDOWS)))
    parser.add_argument("--clouds", default="1,12,96", help="into which 96,000 points are split")
    parser.add_argument("--curve-points", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--longest", type=float, default=20.0, help="seconds of a call")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--only-clouds", action="store_true", help="keep the rows of the file that is there")
    parser.add_argument("--busy", action="store_true", help="other work runs on the machine")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    rows: list[dict[str, Any]] = []
    for name in options.mixers.split(",") if not options.only_clouds else ():
        for window in map(int, options.windows.split(",")):
            before: tuple[int, float] | None = None
            for points in map(int, options.points.split(",")):
                row: dict[str, Any] = {"mixer": name, "points": points, "window": window}
                power = 2 if name == "softmax" and not window else 1
                foretold = before[1] * (points / before[0]) ** power if before else 0.0
                if foretold > options.longest:
                    row["left_out"] = f"about {foretold:.0f} s"
                else:
                    rounds = 1 if foretold > LONG else options.rounds
                    row.update(cell(name, points, window, options.dim, options.heads, rounds))
                    before = points, row["seconds"]
                rows.append(row)
                print(row, flush=True)
    settings = {"dim": options.dim, "heads": options.heads, "rounds": options.rounds, "longest": options.longest,
                "busy": options.busy}  # fmt: skip
    torch.set_num_threads(1)
    clouds = []
    for name in options.mixers.split(","):
        for count in map(int, options.clouds.split(",")) if name != "softmax" else ():
            clouds.append(split(name, SPLIT, count, options.dim, options.heads, options.rounds))
            print(clouds[-1], flush=True)
    curves = curve_speeds(options.curve_points, 5)
    print(curves, flush=True)
    content = {"machine": manifest("cpu", options.threads), "settings": settings, "rows": rows}
    if options.only_clouds:
        content = json.loads(options.out.read_text())
    save({**content, "clouds": clouds, "curves": curves}, options.out)


if __name__ == "__main__":
    main()
