"""A language model on sequences four times as long as a process may hold.

    python benchmarks/shared_sequence.py OUT.json MIB MORE

Every process has a limit on its own memory (RLIMIT_DATA) of MIB. One process, by torchrun too, whose libraries need
memory, is tried with more and more tokens under it. Four with four times as many must come to the losses of one without
a limit. Then one of four is killed, torchrun ends the others, and the run goes on with three of MORE MiB, as each of
them has a third of the tokens.
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

OWN = 65536  # tokens of a sequence in one process: so many that the libraries' memory counts little beside them
STEPS = 8
MODEL = ["--mixer", "pom:decay=8", "--set", "num_layers=2", "--set", "hidden_size=64", "--set", "num_heads=1"]
OPTIONS = ["--vocab", "512", "--batch-size", "1", "--steps", str(STEPS), "--log-every", "1", "--checkpoint-every", "2",
           "--evaluate-tokens", "1024", "--sample-tokens", "0", "--ema", "0", "--threads", "1", *MODEL]  # fmt: skip


def start(out: Path, tokens: int, processes: int, mib: int | None, *more: str) -> subprocess.Popen[str]:
    if (out.parent / "data").is_dir() and not out.is_dir():  # the text and its tokens, prepared once
        shutil.copytree(out.parent / "data", out / "data")
    torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [sys.executable, *torchrun, "-m", "polymix", "train", "text", *OPTIONS,
               "--context", str(tokens), "--out", str(out), *more]  # fmt: skip
    command += ["--sequence-parallel", str(processes)] if processes > 1 else ["--strategy", "ddp"]
    # small stacks, or those of unused threads would count
    size = "unlimited" if mib is None else mib * 1024
    limit = ["bash", "-c", f'ulimit -s 1024; ulimit -d {size}; exec "$@"', "limited"]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "MALLOC_ARENA_MAX": "1"}
    return subprocess.Popen([*limit, *command], env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def run(*arguments: Any) -> tuple[bool, str]:
    """Whether a run ended well, and its last lines."""
    process = start(*arguments)
    said = process.communicate()[0]
    return process.returncode == 0, said[-2000:]


def losses(out: Path) -> dict[int, float]:
    path = out / "metrics.jsonl"
    rows = map(json.loads, path.read_text().splitlines() if path.exists() else ())
    return {row["step"]: row["loss"] for row in rows if "loss" in row}


def workers(pid: int) -> list[int]:
    paths = Path(f"/proc/{pid}/task").glob("*/children")
    return [int(word) for path in paths for word in path.read_text().split()]


def main(path: Path, mib: int, more: int) -> None:
    root = Path(mkdtemp(prefix="shared-"))
    found: dict[str, Any] = {
        "machine": manifest("cpu", 1),
        "own": OWN,
        "mib": mib,
        "steps": STEPS,
        "alone": [],
        "losses": {},
    }

    def say(**what: Any) -> None:
        print(what, flush=True)
        found.update(what)
        write_whole(path, json.dumps(found, indent=1) + "\n")

    for tokens in (OWN, OWN * 5 // 4, 4 * OWN):  # what one process may hold
        good, said = run(root / f"alone-{tokens}", tokens, 1, mib)
        last = [line.strip() for line in said.splitlines() if "alloc" in line.lower() or "memory" in line.lower()]
        reason = (last or [said])[-1][-200:]
        say(
            alone=[
                *found["alone"],
                {
                    "tokens": tokens,
                    "trained": good,
                    "steps": len(losses(root / f"alone-{tokens}")),
                    "reason": "" if good else reason,
                },
            ]
        )
    whole, four = root / "whole", root / "four"
    good, said = run(whole, 4 * OWN, 1, None)
    assert good, said
    say(losses={"one": losses(whole)})
    good, said = run(four, 4 * OWN, 4, mib)
    assert good, said
    say(losses={**found["losses"], "four": losses(four)})
    killed = root / "killed"
    process = start(killed, 4 * OWN, 4, mib)
    while not (killed / "checkpoint" / "last.ckpt").exists():
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    os.kill(workers(process.pid)[-1], signal.SIGKILL)
    process.communicate()
    say(killed_after=max(losses(killed)), status=process.returncode)
    good, said = run(killed, 4 * OWN, 3, more, "--resume")
    assert good, said
    say(more=more, losses={**found["losses"], "three": losses(killed)})
    pairs = [(losses(whole)[step], losses(other)[step]) for other in (four, killed) for step in losses(whole)]
    say(largest_difference=max(abs(a - b) for a, b in pairs))
    shutil.rmtree(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
