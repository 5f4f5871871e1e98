"""What all steps share: sizes, the results file, the clock."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch

import polymix
from gpu_steps.digests import digests
from polymix.errors import ResultsError
from polymix.files import write_whole
from polymix.measure import Stopwatch, Timing, in_turn, interleaved, once

K = TypeVar("K", bound=Hashable)
Row = dict[str, Any]
Jobs = Iterator[tuple[str, Callable[[], list[Row]]]]  # a name that never changes, and what gives the job's rows
SCHEMA = "polymix.gpu/1"
STEPS = ("tests", "ceilings", "ops", "paper", "mixers", "others", "models", "compiled")
DTYPES = ("float32", "bfloat16")
LONGEST = 3.0  # seconds: slower calls are left out


@dataclass(frozen=True)
class Sizes:
    """What is measured at which sizes. `dim` is for the ops and for the paper's setting."""

    tokens: tuple[int, ...] = tuple(4**k for k in range(4, 11))
    batch: tuple[int, ...] = (1, 4, 32)
    dim: int = 192
    heads: int = 3
    dims: tuple[int, ...] = (192, 768)
    paper_tokens: int = 4096
    check_tokens: int = 256
    copy_bytes: int = 1 << 30
    squares: tuple[int, ...] = (4096, 8192)
    kernel: int = 11  # of padre
    seconds: float = 0.1  # for all runs of one call


QUICK = Sizes(tokens=(4096, 65536), batch=(1,), dims=(192,), seconds=0.05)
DRY = Sizes((16,), (1,), 12, 3, (12,), 16, 16, 1 << 16, (16, 32), kernel=3)


class Clock:
    """Times calls in turn, each with a cold L2 cache.

    On a GPU by CUDA events around the call. The card is kept busy while Python issues the call, so that the events
    enclose the card's work only, not the wait for Python. `interleaved` includes that wait.
    """

    def __init__(self, device: str) -> None:
        self.device, self.gpu = device, device.startswith("cuda")
        if self.gpu:
            cache = torch.cuda.get_device_properties(device).L2_cache_size
            self.dirt = torch.empty(max(4 * cache, 256 << 20), dtype=torch.int8, device=device)

    def __call__(self, calls: Mapping[K, Callable[[], Any]], seconds: float) -> dict[K, Timing]:
        if not self.gpu:
            return in_turn(calls, 1, device=self.device)
        rounds, issues = {}, {}
        for name, call in calls.items():
            once(call, self.device)
            estimate = once(call, self.device)
            issues[name] = once(call) if estimate < 0.1 else 0.0  # by no device: Python's part alone
            rounds[name] = min(50, max(3, int(seconds / max(estimate, 1e-6))))
        runs: dict[K, list[float]] = {name: [] for name in calls}
        for turn in range(max(rounds.values(), default=0)):
            for name, call in calls.items():
                if turn < rounds[name]:
                    runs[name].append(self._once(call, issues[name]))
        return {name: Timing(tuple(values)) for name, values in runs.items()}

    def waited(self, calls: Mapping[K, Callable[[], Any]], seconds: float) -> dict[K, Timing]:
        """The same calls back to back, as a user waits for them: warm caches, and the time of Python included."""
        return interleaved(calls, seconds=seconds, device=self.device) if self.gpu else self(calls, seconds)

    def _once(self, call: Callable[[], Any], issue: float) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self.device)
        self.dirt.zero_()
        torch.cuda._sleep(int(min(4e9 * issue, 1e8)))  # cycles: at the 2 GHz of no card yet, twice as long as issuing
        start.record()
        call()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3


def foreseen(fewer: Sequence[Row], n: int, power: int) -> str | None:
    """Why n tokens would be too slow, given the rows at fewer tokens; time grows as n to this power. None if not."""
    if not fewer:
        return None
    last = fewer[-1]
    if last["stopped"]:
        return str(last["stopped"])
    expected = last["seconds"] * (n / last["tokens"]) ** power
    return f"would take {expected:.2g} s" if expected > LONGEST else None


def reason(error: Exception) -> str:
    if isinstance(error, torch.OutOfMemoryError):
        return "out of memory"
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def timing(its: Timing) -> Row:
    return {"seconds": its.median, "low": its.low, "high": its.high, "runs": list(its.runs), "clock": its.clock}


@dataclass
class Bench:
    """One run. Results are saved after every job, and a later call continues from there."""

    device: str
    sizes: Sizes
    path: Path | None  # None saves nothing
    content: dict[str, Any]
    budget: float  # seconds after which no new job starts
    dry: bool
    clock: Clock
    pom: Path | None = None
    watch: Stopwatch = field(default_factory=Stopwatch)  # since when the budget counts

    def rows(self, step: str, **where: Any) -> list[Row]:
        """The rows of a step with these values."""
        return [row for row in self.content["steps"][step] if all(row.get(k) == v for k, v in where.items())]

    def finished(self, file: str) -> bool:
        """Whether a file of tests has a verdict. Jobs whose tests have none wait for another call."""
        return bool(self.rows("tests", what=file))

    def failed_tests(self, file: str) -> str | None:
        """Why code that this file tests may not be timed; None if its tests pass."""
        return f"its tests fail ({file})" if self.rows("tests", what=file)[0]["failed"] else None

    def left(self) -> float:
        return self.budget - self.watch.seconds()

    def do(self, step: str, jobs: Jobs) -> bool:
        """Run the jobs that are not done. Returns False if time ran out, or a job failed.

        A job that raises is reported under "errors" and tried again by the next call; the others run.
        """
        errors, whole = self.content.setdefault("errors", {}), True
        errors.pop(step, None)
        try:
            for name, job in jobs:
                if name not in self.content["done"]:
                    if self.left() <= 0:
                        return False
                    whole = self._attempt(step, name, job) and whole
        except Exception as error:  # what lists the jobs failed
            errors[step] = reason(error)
            self.save()
            return False
        return whole

    def _attempt(self, step: str, name: str, job: Callable[[], list[Row]]) -> bool:
        """Run one job and save its rows, or why it failed."""
        errors = self.content["errors"]
        torch.manual_seed(0)
        try:
            self.content["steps"][step] += job()
            self.content["done"].append(name)
            errors.pop(name, None)
        except Exception as error:  # the next job may work
            errors[name] = reason(error)
            print(f"{name}: {errors[name]}", file=sys.stderr, flush=True)
        self.save()
        if self.clock.gpu:
            torch.cuda.empty_cache()  # the next job has other sizes
        return name not in errors

    def save(self) -> None:
        if self.path is not None:
            write_whole(self.path, json.dumps(self.content, indent=1, allow_nan=False) + "\n")


def code() -> str:
    """A digest of the measured code. Results of other code are not continued."""
    root = Path(polymix.__file__).parent
    files = sorted(f for part in ("ops", "mixers", "structured") for f in (root / part).rglob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def begin(path: Path | None, sizes: Sizes, machine: Row, fresh: bool) -> dict[str, Any]:
    """The results to continue: new ones, or those that the same code on the same machine left at `path`."""
    settings = json.loads(json.dumps({**asdict(sizes), "code": code()}))
    new = {"schema": SCHEMA, "finished": False, "settings": settings, "machine": machine, "missing": [], "done": []}
    new["kernels"] = digests()
    new["steps"] = {step: [] for step in STEPS}
    if path is None or fresh or not path.exists():
        return new
    try:
        old = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        got = f"{path}, which cannot be read ({error})"
        raise ResultsError("--out", got, "a results file", "Start over with --fresh.") from error
    if not isinstance(old, dict) or old.get("schema") != SCHEMA:
        raise ResultsError("--out", f"{path}, which this script did not write", SCHEMA, "Choose another file.")
    for part in ("settings", "machine"):
        changed = sorted(key for key in {*new[part], *old[part]} if new[part].get(key) != old[part].get(key))
        if changed:
            got = f"{path}, where {', '.join(changed)} of the {part} differ from this run's"
            raise ResultsError("--out", got, "a file of the same run", "Use --fresh to start over, or another --out.")
    return old
