"""Step tests: the kernels' tests on the card, and each mixer with kernels against its eager code in float64."""

from __future__ import annotations

import importlib.util
import os
import signal
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from gpu_steps.bench import DTYPES, Bench, Jobs, Row, reason
from gpu_steps.mixers import MIXERS, TESTS, config
from polymix.measure.case import check, prepare
from polymix.workflows.bench.run import Group

Process = subprocess.Popen[bytes]
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "tests" / "ops"
FILES = sorted({*TESTS.values()})
SHARE = 0.6  # of the time that is left, for the tests


def jobs(bench: Bench) -> Jobs:
    if bench.dry:
        yield "tests collected", _collect
    else:
        missing = [file for file in FILES if f"tests {file}" not in bench.content["done"]]
        started = {file: _start(file) for file in missing}
        try:
            spare = (1 - SHARE) * bench.left()  # for the steps after the tests
            for file, (process, output) in started.items():
                try:
                    process.wait(timeout=max(0.1, bench.left() - spare))
                except subprocess.TimeoutExpired:
                    print(f"{file} did not finish in time. Jobs that depend on it wait for the next call.", flush=True)
                else:
                    yield f"tests {file}", partial(_judge, file, process, output)
        finally:
            for process, output in started.values():
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()
                output.close()
    for label, dtype, pass_ in product(MIXERS, DTYPES, ("forward", "training")):
        yield f"check {label} {dtype} {pass_}", partial(_check, bench, label, dtype, pass_)


def _command(*arguments: str) -> list[str]:
    """What PyTorch's or a plugin's other version warns of is no wrong number."""
    options = ["-q", "-W", "default", "-o", "addopts=", "-p", "no:cacheprovider", "-p", "no:benchmark"]
    return [sys.executable, "-m", "pytest", *options, *arguments]


def _start(file: str) -> tuple[Process, IO[str]]:
    """Start it in a session of its own, so that its workers end with it."""
    workers = max(1, (os.cpu_count() or 1) // len(FILES))
    spread = ["-n", str(workers)] if importlib.util.find_spec("xdist") else []
    said = TemporaryFile("w+", encoding="utf-8")  # noqa: SIM115  an unread pipe would block the process
    process = subprocess.Popen(
        _command(*spread, str(FOLDER / file)), cwd=ROOT, start_new_session=True, stdout=said, stderr=subprocess.STDOUT
    )
    return process, said


def _judge(file: str, process: Process, output: IO[str]) -> list[Row]:
    output.seek(0)
    said = output.read().strip().splitlines()
    failed = None if process.returncode == 0 else "\n".join(said[-15:]) or f"status {process.returncode}"
    return [{"what": file, "said": said[-1] if said else "", "failed": failed}]


def _collect() -> list[Row]:
    """For a dry run: check that the tests exist and can be imported."""
    files = [str(FOLDER / file) for file in FILES]
    done = subprocess.run(_command("--collect-only", *files), cwd=ROOT, capture_output=True, text=True, check=False)
    failed = done.stdout[-2000:] if done.returncode else None
    said = (done.stdout.strip().splitlines() or [""])[-1]
    return [{"what": file, "said": said, "failed": failed} for file in FILES]


def _check(bench: Bench, label: str, dtype: str, pass_: str) -> list[Row]:
    sizes = bench.sizes
    row: Row = {"what": label, "dtype": dtype, "pass": pass_}
    try:
        group = Group(sizes.check_tokens + 4, sizes.dim, 2, dtype, pass_, 1)  # no multiple of a tile
        return [{**row, "failed": check(prepare(config(label, "triton", sizes), group.setting(bench.device)))}]
    except Exception as error:  # any failure becomes its result
        return [{**row, "failed": reason(error)}]
