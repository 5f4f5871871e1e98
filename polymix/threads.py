"""CPU threads: how many are free for this process, how busy the machine is, and how long idle threads spin.

Needs no PyTorch: the command line calls `prepare` before PyTorch is loaded, as OpenMP reads its environment then.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, MutableMapping
from pathlib import Path

# A thread of libgomp that waits for another one asks about 300,000 times, for milliseconds, before it sleeps. Where the
# other one was descheduled, this keeps it from running.
SPINS = "GOMP_SPINCOUNT"
SPIN_COUNT, BUSY_SPIN_COUNT = 3_000, 1_000  # benchmarks/busy.py; docs/threads.md has the table
CHOICES = (SPINS, "OMP_WAIT_POLICY")  # how a user says it
BUSY = 1.25  # programs that run or wait per core; one's own last command has left at most 1

_prepared = False  # whether `prepare` has set the variable
_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")


def prepare(environment: MutableMapping[str, str] = os.environ) -> None:
    """Let idle threads sleep early, on a busy machine even earlier, which costs speed when it becomes quiet.

    Nothing is set where the user has said how long they spin, or PyTorch is loaded already.
    """
    global _prepared
    if "torch" not in sys.modules and not any(name in environment for name in CHOICES):
        environment[SPINS] = str(BUSY_SPIN_COUNT if is_busy() else SPIN_COUNT)
        _prepared = True


def affinity() -> int:
    """The cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def quota() -> float | None:
    """The cores' worth of time that the process's cgroup, or one around it, may use; None where nothing limits it."""
    return min(_quotas(), default=None)


def cores() -> int:
    """The threads that can run at once: by affinity, and by the cgroup's quota, beyond which all are stopped."""
    limit = quota()
    return affinity() if limit is None else max(1, min(affinity(), int(limit)))


def stated() -> int | None:
    """What OMP_NUM_THREADS says; None where it says no number above 0."""
    first = os.environ.get("OMP_NUM_THREADS", "").partition(",")[0].strip()  # a list is for nested regions
    return int(first) or None if first.isdecimal() else None


def load() -> float:
    """The programs that have run or waited during the last minute, on the whole machine; 0 where it is not known."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):  # Windows; no /proc
        return 0.0


def is_busy() -> bool:
    """Whether more programs want to run than the machine has cores."""
    return load() >= BUSY * (os.cpu_count() or 1)


def free() -> int:
    """The threads that a command runs by default: one per core, and on a busy machine a fair share of them.

    A thread whose partner waits for a core waits too, so that threads beyond the share slow a command down.
    """
    machine = os.cpu_count() or 1
    share = machine / (machine + load()) if is_busy() else 1
    return max(1, int(cores() * share))


def crowd() -> str:
    """What a busy machine is told by, as the beginning of a sentence."""
    return f"The machine is busy: {load():.1f} programs run or wait for {os.cpu_count()} cores"


def busy_warning(threads: int) -> str:
    """A sentence where a busy machine leaves a command `threads`, fewer than there are cores; else empty."""
    whole = cores()
    if threads == whole:
        return ""
    return f"{crowd()}. Commands use {threads} of {whole} threads then; --threads sets another number."


def spinning() -> str:
    """How long idle threads spin, and who said so."""
    said = [f"{name}={os.environ[name]}" for name in CHOICES if name in os.environ]
    if not said:
        return f"{SPINS} is not set; the commands set {SPIN_COUNT}, or {BUSY_SPIN_COUNT} on a busy machine"
    return f"{', '.join(said)}{' (set by polymix)' * _prepared}"


def _quotas() -> Iterator[float]:
    """The limits of cgroups, of version 2 and 1: the process's own and those around it."""
    for line in _lines(_MEMBERSHIP):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "cpu" not in controllers.split(","):
            continue
        mount = _CGROUPS / controllers if controllers else _CGROUPS
        folder = mount / path.lstrip("/")
        # In a container the path may be the host's, which is not there: then the mount itself is the process's cgroup.
        for place in (folder, *folder.parents):
            limit = _of_version_1(place) if controllers else _of_version_2(place)
            if limit is not None:
                yield limit
            if place == mount:
                break


def _of_version_2(folder: Path) -> float | None:
    """From cpu.max: "max 100000", or the microseconds of time in each period, and the period."""
    parts = " ".join(_lines(folder / "cpu.max")).split()
    return _ratio(*parts) if len(parts) == 2 else None


def _of_version_1(folder: Path) -> float | None:
    """From two files; -1 is no limit."""
    parts = [" ".join(_lines(folder / f"cpu.cfs_{name}_us")).strip() for name in ("quota", "period")]
    return _ratio(*parts)


def _ratio(time: str, period: str) -> float | None:
    return int(time) / int(period) if time.isdecimal() and period.isdecimal() and int(period) and int(time) else None


def _lines(path: Path) -> list[str]:
    try:
        return path.read_text().splitlines()
    except (OSError, ValueError):
        return []
