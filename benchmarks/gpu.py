"""Tests and measures the kernels on a GPU: ceilings, ops, whole mixers and models, attention, others' kernels.

    python benchmarks/gpu.py [--pom CLONE] [--out benchmarks/results/gpu-<card>.json]

It starts no new job after --budget seconds; run the same command again to continue. The JSON file is written after
every job; a job that raises is reported in it, and the others run. Code that fails its tests gets no speed. Without a
GPU, `--device cpu --dry-run --out FILE` runs the same steps on tiny sizes under Triton's interpreter.
Exit status: 0; 1 if a test, a check or a job fails; 2 if the options cannot be served.
"""

# ruff: noqa: E402  the import path is set first

from __future__ import annotations

import argparse
import os
import re
import sys
from pathlib import Path

import torch

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent)]  # the package need not be installed

from gpu_steps import ceilings, checks, mixers, models, ops, others
from gpu_steps.bench import DRY, QUICK, STEPS, Bench, Clock, Row, Sizes, begin
from gpu_steps.report import report

from polymix.devices import check_device
from polymix.errors import OptionError, PolymixError, check_choice
from polymix.extras import needs
from polymix.measure import Stopwatch, manifest

JOBS = {
    "tests": checks.jobs, "ceilings": ceilings.jobs, "ops": ops.jobs, "paper": mixers.paper_jobs,
    "mixers": mixers.mixer_jobs, "others": others.jobs, "models": models.jobs,
    "compiled": mixers.compiled_jobs,
}  # fmt: skip
NEEDED = ("tests", "ceilings")  # by all other steps, so they always run


def arguments(given: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="results file (default: benchmarks/results/gpu-<card>.json)")
    parser.add_argument("--only", default=",".join(STEPS), help=f"some of {','.join(STEPS)}; the first two always run")
    parser.add_argument("--budget", type=float, default=540.0, help="seconds after which no new job starts")
    parser.add_argument("--pom", type=Path, help="a clone of github.com/davidpicard/pom")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--quick", action="store_true", help="two token counts, batch 1, 192 channels")
    parser.add_argument("--dry-run", action="store_true", help="tiny sizes, to check the script; needs --out")
    parser.add_argument("--fresh", action="store_true", help="start over if the file holds another run")
    return parser.parse_args(given)


def machine(device: str, dry: bool) -> Row:
    with needs(why="PyTorch for CUDA brings it."):
        import triton
    return {**manifest(device, torch.get_num_threads()), "triton": triton.__version__, "dry_run": dry}


def check(its: argparse.Namespace) -> None:
    """Find mistakes in the arguments before anything runs."""
    for step in its.only.split(","):
        check_choice("--only", step, STEPS)
    if not its.budget > 0:
        raise OptionError("--budget", its.budget, "seconds above 0", "Try 540.")
    gpu = its.device.startswith("cuda")
    if its.dry_run and its.out is None:
        raise OptionError("--dry-run", "no --out", "a file of its own", "Add --out dry.json.")
    if not gpu and not its.dry_run:
        raise OptionError("--device", its.device, "cuda, or cpu with --dry-run", "The kernels are for GPUs.")
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if gpu and interpreted:
        raise OptionError("TRITON_INTERPRET", 1, "unset on a GPU", "The interpreter's times mean nothing.")
    if gpu and not torch.cuda.is_available():
        cure = "To check the script without one, use --device cpu --dry-run --out FILE."
        raise OptionError("--device", f"{its.device}, but PyTorch finds no GPU", "a machine with a GPU", cure)
    check_device(its.device, "--device")
    if not gpu:
        os.environ["TRITON_INTERPRET"] = "1"  # before triton is first imported
    if its.pom is not None:
        others.authors(its.pom)


def main(given: list[str] | None = None) -> int:
    watch, its = Stopwatch(), arguments(given)
    try:
        check(its)
        torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
        sizes = DRY if its.dry_run else QUICK if its.quick else Sizes()
        where = machine(its.device, its.dry_run)
        card = re.sub(r"[^a-z0-9]+", "-", (where["gpu"] or "cpu").lower()).strip("-")
        path = its.out or HERE / "results" / f"gpu-{card}{'-quick' if its.quick else ''}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        content = begin(path, sizes, where, its.fresh)
    except PolymixError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    bench = Bench(its.device, sizes, path, content, its.budget, its.dry_run, Clock(its.device), its.pom,
                  watch)  # fmt: skip
    finished = True
    for step in STEPS:
        if step in NEEDED or step in its.only.split(","):
            print(f"{step} …", file=sys.stderr, flush=True)
            finished = bench.do(step, JOBS[step](bench)) and finished
    finished = finished and all(map(bench.finished, checks.FILES))
    content["finished"] = finished and set(its.only.split(",")) == set(STEPS)
    content["missing"] = others.missing(bench)
    bench.save()
    print(report(content))
    print(f"\nNumbers: {path}")
    return int(
        bool(content["errors"]) or any(row.get("failed") for step in ("tests", "ops") for row in content["steps"][step])
    )


if __name__ == "__main__":
    raise SystemExit(main())
