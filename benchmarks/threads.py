"""Each mixer on 1, 2, 4 and 8 threads, more than this machine may have: results must agree and time must not collapse.

    python benchmarks/threads.py benchmarks/results/threads.json

Forward without gradients at 4,096 tokens; training step of 16 × 196 tokens; 192 channels, float32. The last column
is the largest difference from the result on one thread, relative to the largest value.
"""

import argparse
from pathlib import Path

import torch
from saving import save

from polymix.convert.tracing import Cotangents
from polymix.measure import manifest
from polymix.measure.timing import interleaved_within
from polymix.mixers.spec import parse_mixer

COTANGENTS = Cotangents()
MIXERS = ("padre", "pom", "qt", "poly_sa", "poly_nl", "softmax")
THREADS = (1, 2, 4, 8)
CASES = {"forward": (1, 64, 64), "training": (16, 14, 14)}  # batch and grid


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--seconds", type=float, default=1.0, help="per row")
    options = parser.parse_args()
    rows = []
    for name in MIXERS:
        for case, (batch, *grid) in CASES.items():
            torch.manual_seed(0)
            mixer = parse_mixer(name)[1].for_grid(tuple(grid)).build(192).eval()
            x = torch.randn(batch, grid[0] * grid[1], 192)
            results: dict[int, torch.Tensor] = {}

            def call(threads: int) -> None:
                torch.set_num_threads(threads)
                if case == "forward":  # noqa: B023
                    with torch.inference_mode():
                        results[threads] = mixer(x)  # noqa: B023
                    return
                mixer.zero_grad()  # noqa: B023
                y = mixer(x)  # noqa: B023
                y.backward(COTANGENTS(y))
                results[threads] = torch.cat([p.grad.flatten() for p in mixer.parameters()])  # noqa: B023

            calls = {threads: (lambda threads=threads: call(threads)) for threads in THREADS}
            times = {n: timing.median * 1e3 for n, timing in interleaved_within(calls, options.seconds, "cpu").items()}
            differs = max(float((results[n] - results[1]).abs().max() / results[1].abs().max()) for n in THREADS)
            rows.append({"mixer": name, "case": case, "clock": "wall", "ms": times, "largest_difference": differs})
            print(f"{name:8} {case:9}" + "".join(f"{times[n]:9.2f}" for n in THREADS) + f"  {differs:.0e}", flush=True)
    save({"machine": manifest("cpu", max(THREADS)), "rows": rows}, options.out)


if __name__ == "__main__":
    main()
