"""A language model on sequences four times as long as a process may hold.

    python benchmarks/shared_sequence.py OUT.json MIB MORE NEAR

Every process has a limit on its own memory (RLIMIT_DATA) of MIB. The longest sequence that one process trains on under
it is searched by halves near NEAR tokens; it is started by torchrun too, whose libraries need memory. Four with four
times as many tokens, who shard the weights as well, must come to the losses of one without a limit. Then one of four is
killed, torchrun ends the others, and the run goes on with three of MORE MiB, as each of them has a third of the tokens.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

from polymix.files import write_whole
from polymix.measure.machine import manifest

GRAIN = 128  # tokens of a process, to which its longest sequence is found
BOUNDS = -3, 3  # grains from NEAR: within the limit and beyond it
STEPS, TRIED = 6, 2  # of the runs, and of those of the search: the second step has the optimizer's state
# Of a small model the logits need most of the memory; blocks are computed again, so that little else grows with N.
MODEL = ["--mixer", "pom:decay=8", "--set", "num_layers=2", "--set", "hidden_size=128", "--set", "num_heads=1",
         "--set", "checkpointing=true"]  # fmt: skip
OPTIONS = ["--vocab", "4096", "--batch-size", "1", "--log-every", "1", "--checkpoint-every", "2", "--evaluate-every",
           str(STEPS), "--evaluate-tokens", "1024", "--sample-tokens", "0", "--ema", "0", "--threads", "1",
           "--control", "False", *MODEL]  # fmt: skip
SHARDED = ["--strategy", "fsdp"]  # what several processes share besides: the weights, and the optimizer's state
# Small stacks, or those of unused threads would count; and what is freed goes back at once, or it would count too.
ENVIRONMENT = {"OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536",
               "MALLOC_TRIM_THRESHOLD_": "65536"}  # fmt: skip
LIMITED = 'ulimit -s 1024; ulimit -d "$1"; shift; exec "$@"'


def start(out: Path, tokens: int, processes: int, mib: int | None, *more: str) -> subprocess.Popen[str]:
    kept = out.parent / "data"  # the text and its tokens, prepared once
    if kept.is_dir() and not out.is_dir():
        shutil.copytree(kept, out / "data")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, "-m", "polymix", "train", "text", *OPTIONS,
               "--context", str(tokens), "--out", str(out), *more]  # fmt: skip
    command += ["--sequence-parallel", str(processes)] if processes > 1 else ["--strategy", "ddp"]
    limit = ["bash", "-c", LIMITED, "limited", "unlimited" if mib is None else str(mib * 1024)]
    env = {**os.environ, **ENVIRONMENT}
    return subprocess.Popen([*limit, *command], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(out: Path, tokens: int, processes: int, mib: int | None, *more: str) -> str:
    """Nothing of a run that trained and saved its model, whatever was measured then; of another its last lines."""
    process = start(out, tokens, processes, mib, *more)
    said = process.communicate()[0]
    if not (out.parent / "data").is_dir():
        shutil.copytree(out / "data", out.parent / "data")
    return "" if (out / "model.safetensors").is_file() else said[-4000:] or "no word"


def longest(root: Path, mib: int, near: int) -> int:
    """The most tokens, in grains, on which one process trains under a limit."""
    low, high = first, last = [near // GRAIN + bound for bound in BOUNDS]
    while high - low > 1:
        middle, out = (low + high) // 2, root / "searched"
        said = run(out, middle * GRAIN, 1, mib, "--steps", str(TRIED))
        assert not said or "alloc" in said or "memory" in said.lower(), said
        print(f"{middle * GRAIN:,} tokens:", "out of memory" if said else "trained", flush=True)
        low, high = (low, middle) if said else (middle, high)
        shutil.rmtree(out)
    assert low > first and high < last, f"far from {near}: {low * GRAIN}"
    return low * GRAIN


def losses(out: Path) -> dict[int, float]:
    rows = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def workers(pid: int) -> list[int]:
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in paths for word in path.read_text().split()]


def main(path: Path, mib: int, more: int, near: int) -> None:
    root = Path(mkdtemp(prefix="shared-"))
    found: dict[str, Any] = {"machine": manifest("cpu", 1), "mib": mib, "more": more, "steps": STEPS, "grain": GRAIN,
                             "losses": {}}  # fmt: skip

    def say(**what: Any) -> None:
        print(what, flush=True)
        found.update(what)
        write_whole(path, json.dumps(found, indent=1) + "\n")

    trained = ["--steps", str(STEPS)]
    assert not (said := run(root / "first", 256, 1, None, "--steps", "1")), said
    say(own=longest(root, mib, near))
    tokens = 4 * found["own"]
    for name, processes, limit in (("one", 1, None), ("four", 4, mib)):
        assert not (said := run(root / name, tokens, processes, limit, *trained, *SHARDED * (processes > 1))), said
        say(losses={**found["losses"], name: losses(root / name)})
    killed = root / "three"
    process = start(killed, tokens, 4, mib, *trained, *SHARDED)
    while not (killed / "checkpoint" / "last.ckpt").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    process.communicate()
    say(killed_after=max(losses(killed)), status=process.returncode)
    assert not (said := run(killed, tokens, 3, more, *trained, *SHARDED, "--resume")), said
    say(losses={**found["losses"], "three": losses(killed)})
    shutil.rmtree(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *map(int, sys.argv[2:5]))
