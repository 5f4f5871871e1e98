"""Memory of one call, measured in a process of its own: nothing that ran before can hide in it or add to it.

`python -m polymix.measure.memory` imports PyTorch once, computes nothing, and forks for every cell it is asked about.
"""

from __future__ import annotations

import gc
import os
import pickle
import signal
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from polymix.errors import CapabilityError
from polymix.measure.case import Cell, prepare, wrong
from polymix.measure.timing import once, peak_memory
from polymix.mixers import MixerConfig
from polymix.workflows.bench.settings import Group

_WARM = 64  # tokens of a call before the one that counts: it loads libraries and starts threads
_READY = b"ready"


@dataclass(frozen=True)
class Memory:
    """Bytes beyond input and weights. `failed` says why there are none."""

    seconds: float = 0.0  # of one call, cold caches and all
    peak_bytes: int = 0  # held at once by what PyTorch allocates, output included
    resident_bytes: int | None = None  # growth of the process's peak resident set, scratch of libraries included
    output_bytes: int = 0
    state_bytes: int | None = None
    failed: str | None = None


def measure(config: MixerConfig, group: Group, device: str, check: bool) -> Memory:
    """One cell in this process; whatever goes wrong in it is its result."""
    try:
        torch.set_num_threads(group.threads)
        prepare(config, replace(group, tokens=min(group.tokens, _WARM)), device).call()
        memory = _measure(prepare(config, group, device), device)
        reason = wrong(config, group, device) if check else None
        return replace(memory, failed=reason)
    except MemoryError:
        return Memory(failed=f"ran out of memory at {group.tokens:,} tokens")
    except Exception as error:
        if isinstance(error, RuntimeError) and "memory" in str(error).lower():
            return Memory(failed=f"ran out of memory at {group.tokens:,} tokens")
        return Memory(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _measure(cell: Cell, device: str) -> Memory:
    gc.collect()
    before = _peak_resident(reset=True)
    seconds = once(cell.call, device)
    resident = None if device.startswith("cuda") else _peak_resident() - before
    cell.clear()
    output: list[Any] = []
    peak = peak_memory(lambda: output.append(cell.call()), device)
    return Memory(seconds, peak, resident, output[0].numel() * output[0].element_size(), cell.state_bytes)


def _peak_resident(*, reset: bool = False) -> int:
    """Bytes of the greatest resident set so far; with `reset`, where the system can, of the present one."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if status.exists():
        if reset and os.access(clear, os.W_OK):
            clear.write_text("5")
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class Apart:
    """The process that measures memory, from this side."""

    def __enter__(self) -> Apart:
        if not hasattr(os, "fork"):
            raise CapabilityError("polymix bench", sys.platform, "a system that forks processes: Linux, macOS, WSL", "")
        self._start()
        return self

    def _start(self) -> None:
        command = [sys.executable, "-m", "polymix.measure.memory"]
        # A session of its own: Ctrl-C is for the benchmark, which ends it, and whatever it has forked, by itself.
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=_environment()
        )
        assert self._server.stdout is not None
        if self._server.stdout.read(len(_READY)) != _READY:
            self.__exit__()
            raise RuntimeError(f"{' '.join(command)} does not start: see what it printed above")

    def measure(self, config: MixerConfig, group: Group, device: str, *, check: bool) -> Memory:
        assert self._server.stdin is not None and self._server.stdout is not None
        try:
            pickle.dump((config, group, device, check), self._server.stdin)
            self._server.stdin.flush()
            return pickle.load(self._server.stdout)
        except (EOFError, BrokenPipeError, pickle.UnpicklingError):
            self.__exit__()
            self._start()
            return Memory(failed="the process that measured its memory was ended from outside")

    def __exit__(self, *_: object) -> None:
        with self._server:  # closes its pipes, and waits
            if self._server.poll() is None:
                os.killpg(self._server.pid, signal.SIGKILL)


def _environment() -> dict[str, str]:
    """This process's, with its import path: the package need not be installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _serve() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what a library prints is no answer
    peak_memory(lambda: None)  # the profiler imports much when it is first used
    os.write(answers, _READY)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        child = os.fork()
        if not child:
            os.write(answers, pickle.dumps(measure(*job)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            reason = "was ended by the system, for memory most likely" if os.WIFSIGNALED(status) else "came to an end"
            os.write(answers, pickle.dumps(Memory(failed=f"{reason} at {job[1].tokens:,} tokens")))


if __name__ == "__main__":
    from polymix.measure import memory  # under its own name: what is pickled must be found on the other side

    memory._serve()
