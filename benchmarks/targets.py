"""Measures polymix's targets on a CPU: speed, memory, state size.

    python benchmarks/targets.py benchmarks/results/targets.json [--pom CLONE] [--only forward,memory] [--threads 2]

Batch 1, 192 channels, 3 heads where a mixer has heads. Times are medians of calls taken in turn. Missed targets are
marked. CLONE is a checkout of the PoM authors' code, to compare with.
"""

# ruff: noqa: E402  the import path is set first

import argparse
import os
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the package need not be installed

import torch
from saving import save
from target_steps.bf16 import bf16
from target_steps.common import Row
from target_steps.inference import attention, authors, forward, slope
from target_steps.memory import decoding, memory
from target_steps.split import split
from target_steps.training import depthwise, training

from polymix.measure import manifest

GROUPS = {
    f.__name__: f for f in (forward, attention, authors, training, depthwise, memory, decoding, slope, split, bf16)
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("--pom", help="a checkout of the PoM authors' code")
    parser.add_argument("--only", help=f"some of {', '.join(GROUPS)}, separated by commas")
    parser.add_argument("--clock", choices=("wall", "processor"), default="wall", help="of the group bf16")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    chosen = options.only.split(",") if options.only else list(GROUPS)
    if unknown := set(chosen) - set(GROUPS):
        parser.error(f"--only: expected some of {', '.join(GROUPS)}, got {', '.join(unknown)}")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)
    rows: list[Row] = []
    for name in chosen:
        for row in GROUPS[name](options):
            rows.append(row)
            verdict = "met    " if row.met else "NOT MET"
            print(f"{verdict} {row.what}: {row.value:.3g} ({row.sign} {row.target:.3g}) {row.detail}", flush=True)
        content = {"machine": manifest("cpu", options.threads), "rows": [{**r._asdict(), "met": r.met} for r in rows]}
        save(content, options.out)


if __name__ == "__main__":
    main()
