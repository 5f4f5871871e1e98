"""The memory of one call, measured in a process of its own, so that nothing that ran before adds to it or hides it.

`python -m polymix.measure.memory` imports PyTorch once, computes nothing, and forks for every call that it measures.
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
from polymix.measure.case import Case, Setting, check, prepare
from polymix.measure.shapes import near_square
from polymix.measure.timing import once, out_of_memory, peak_memory
from polymix.mixers import MixerConfig

_WARM_UP_TOKENS = 64  # tokens of a first call, which loads libraries and starts threads
_READY = b"ready"


@dataclass(frozen=True)
class Memory:
    """Bytes beyond input and weights. `failed` says why there are none."""

    seconds: float = 0.0  # of one call with cold caches
    peak_bytes: int = 0  # the most that PyTorch's allocations hold at once, output included
    resident_bytes: int | None = None  # growth of the process's peak resident set, other libraries included
    output_bytes: int = 0
    state_bytes: int | None = None
    failed: str | None = None


def measure_memory(config: MixerConfig, setting: Setting, check_numbers: bool) -> Memory:
    """Measure one call in this process. Whatever goes wrong becomes its result."""
    tokens = setting.shape.tokens
    try:
        if setting.threads is not None:
            torch.set_num_threads(setting.threads)
        prepare(config, _short(setting)).call()
        memory = _measure(prepare(config, setting), setting.device)
        reason = check(prepare(config, setting)) if check_numbers else None
        return replace(memory, failed=reason)
    except Exception as error:
        if out_of_memory(error):
            return Memory(failed=f"ran out of memory at {tokens:,} tokens")
        return Memory(failed=f"{type(error).__name__}: {' '.join(str(error).split())[:300]}")


def _short(setting: Setting) -> Setting:
    tokens = min(setting.shape.tokens, _WARM_UP_TOKENS)
    return replace(setting, shape=replace(setting.shape, tokens=tokens, grid=near_square(tokens)))


def _measure(case: Case, device: str) -> Memory:
    gc.collect()
    before = _peak_resident(reset=True)
    seconds = once(case.call, device)
    resident = None if device.startswith("cuda") else _peak_resident() - before
    case.clear()
    output: list[Any] = []
    peak = peak_memory(lambda: output.append(case.call()), device)
    return Memory(seconds, peak, resident, output[0].numel() * output[0].element_size(), case.state_bytes)


def _peak_resident(*, reset: bool = False) -> int:
    """Bytes of the largest resident set so far. `reset` starts again from the present one, where the system can."""
    status, clear = Path("/proc/self/status"), Path("/proc/self/clear_refs")
    if status.exists():
        if reset and os.access(clear, os.W_OK):
            clear.write_text("5")
        line = next(line for line in status.read_text().splitlines() if line.startswith("VmHWM"))
        return 1024 * int(line.split()[1])
    import resource  # not on Windows

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else 1024 * peak


class MemoryProcess:
    """The process that measures memory, as the benchmark sees it."""

    def __enter__(self) -> MemoryProcess:
        if not hasattr(os, "fork"):
            raise CapabilityError("polymix bench", sys.platform, "a system that forks processes: Linux, macOS, WSL", "")
        self._start()
        return self

    def _start(self) -> None:
        command = [sys.executable, "-m", "polymix.measure.memory"]
        # In a session of its own: Ctrl-C reaches the benchmark alone, which then ends this process and its children.
        self._server = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True, env=_environment()
        )
        assert self._server.stdout is not None
        if self._server.stdout.read(len(_READY)) != _READY:
            self.__exit__()
            raise RuntimeError(f"{' '.join(command)} did not start: see its messages above")

    def measure(self, config: MixerConfig, setting: Setting, *, check_numbers: bool) -> Memory:
        """Measure one call there. `check_numbers` compares its numbers with float64 too."""
        assert self._server.stdin is not None and self._server.stdout is not None
        try:
            pickle.dump((config, setting, check_numbers), self._server.stdin)
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
    """This process's, with its import path, so that the package need not be installed."""
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}


def _serve() -> None:
    answers = os.dup(1)
    os.dup2(2, 1)  # what libraries print must not mix with the answers
    peak_memory(lambda: None)  # its first use imports a lot
    os.write(answers, _READY)
    while True:
        try:
            job = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        child = os.fork()
        if not child:
            os.write(answers, pickle.dumps(measure_memory(*job)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            signalled = os.WIFSIGNALED(status)
            reason = "was ended by the system, probably because memory ran out" if signalled else "exited"
            os.write(answers, pickle.dumps(Memory(failed=f"{reason} at {job[1].shape.tokens:,} tokens")))


if __name__ == "__main__":
    from polymix.measure import memory  # by this name, so that what is pickled is found on the other side

    memory._serve()
