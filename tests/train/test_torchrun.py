"""Two processes of a real torchrun: one writer, and the same results after kill -9 and --resume."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.helpers import slow_but

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="untested: two processes, for torch.distributed"),
    pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="untested: the workers to kill, for /proc"),
]
ROOT = Path(__file__).parents[2]
STEPS = 40
SMALL = {
    "classify": ["--set=dim=16", "--set=depth=1", "--set=batch_size=32"],
    "detect": ["--preset=tiny"],
}


def start(domain, out, *more):
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "polymix",
               "train", domain, "--threads", "1", "--out", str(out), "--set=control=False", f"--set=steps={STEPS}",
               "--set=log_every=1", "--set=evaluate_every=20", "--set=checkpoint_every=5", *SMALL[domain], *more]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)


def finish(process):
    said = process.communicate()[0]
    assert process.returncode == 0, said
    return said


def descendants(pid):
    """The processes that a process has started, and theirs. They have sessions of their own, which a killpg misses."""
    children = [int(word) for path in Path(f"/proc/{pid}/task").glob("*/children") for word in path.read_text().split()]
    return [*children, *(child for each in children for child in descendants(each))]


def lasting(value):
    """results.json without what depends on the clock or the folder."""
    if isinstance(value, dict):
        clock = ("_per_second", "peak_bytes", "about")
        return {key: lasting(each) for key, each in value.items() if not key.endswith(clock)}
    return [lasting(each) for each in value] if isinstance(value, list) else value


def results(out):
    return lasting(json.loads((out / "results.json").read_text()))


def steps(out):
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]


@pytest.mark.parametrize("domain", slow_but(["classify"], sorted(SMALL), ()))
def test_a_killed_run_of_two_processes_goes_on_to_the_same_results(domain, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    said = finish(start(domain, whole))
    assert said.count(f"{STEPS} steps from 0") == 1, "both processes spoke"
    assert steps(whole) == list(range(1, STEPS + 1)), "both processes wrote"
    victim = start(domain, killed)
    while not (killed / "checkpoint" / "last.ckpt").exists():
        assert victim.poll() is None, victim.communicate()[0]
        time.sleep(0.01)
    for pid in (victim.pid, *descendants(victim.pid)):
        os.kill(pid, signal.SIGKILL)
    victim.communicate()
    assert steps(killed)[-1] < STEPS, "it was killed too late to show anything"
    said = finish(start(domain, killed, "--resume"))
    assert f"{STEPS} steps from 0" not in said
    assert steps(killed) == steps(whole)
    resumed, expected = results(killed), results(whole)
    assert resumed["finished"] and resumed["rows"] == expected["rows"]
    states = [
        torch.load(out / "checkpoint" / "last.ckpt", weights_only=True)["models"]["model"] for out in (whole, killed)
    ]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_a_killed_process_is_started_again_by_torchrun(tmp_path):
    """One of two that share each sequence; the others do not wait for it, and find each other again."""
    out, text = tmp_path / "run", ROOT / "docs" / "speed.md"
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--max-restarts",
               "1", "-m", "polymix", "train", "text", "--sequence-parallel", "2", "--preset", "tiny", "--set", "steps=60",
               "--checkpoint-every", "2", "--evaluate-every", "60", "--data", str(text), "--threads", "1", "--resume",
               "--out", str(out)]  # fmt: skip
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    agent = subprocess.Popen(command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
    while not (out / "checkpoint" / "last.ckpt").exists():
        assert agent.poll() is None, agent.communicate()[0]
        time.sleep(0.01)
    os.kill(descendants(agent.pid)[1], signal.SIGKILL)
    said = finish(agent)
    assert said.count("60 steps from") == 2, said
    assert steps(out) == list(range(1, 61))
