"""Runs that are killed (-9) at a random moment and resumed: the same bits as the run that was not killed.

POLYMIX_KILLS: the number of moments for each command, 3 by default.
"""

import json
import os
import random
import signal
import time

import pytest
import torch

from polymix.cli import main
from tests.attacks.test_files import TRAIN

KILLS = int(os.environ.get("POLYMIX_KILLS", "3"))
VIT = """
from polymix import SoftmaxConfig
from polymix.models import VisionTransformer


def build():
    import torch

    torch.manual_seed(0)
    return VisionTransformer(
        SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=8, depth=1, classes=10, channels=1
    )
"""
COMMANDS = {
    "train": [word.replace("steps=4", "steps=12") for word in TRAIN[:-2]],
    "convert": ["convert", "--model", "vit.py:build", "--plan", "pom", "--data", "digits", "--distill-epochs", "2",
                "--seconds", "0.05", "--lengths", "1", "--threads", "1"],
    "compare": ["compare", "--epochs", "1", "--seeds", "1", "--tokens", "16", "--threads", "1", "--mixers", "pom,linear_floor"],
}  # fmt: skip


def start(arguments):
    """Run a command in a fork of this process, which has imported everything already."""
    pid = os.fork()
    if pid:
        return pid
    try:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, 1)
        os.dup2(null, 2)
        main(arguments)
    except SystemExit as stop:
        os._exit(int(stop.code or 0))
    finally:
        os._exit(99)
    return None


def bits(verb, out):
    """What must not differ: the weights, or the accuracies and losses."""
    content = json.loads((out / "results.json").read_text())
    assert content["finished"]
    if verb == "compare":
        return [(row["mixer"], row["seed"], row["metrics"]) for row in content["rows"]]
    from safetensors.torch import load_file

    assert not list(out.rglob("*.part"))
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(out / "model.safetensors").items()}


@pytest.mark.slow
@pytest.mark.parametrize("verb", list(COMMANDS))
def test_a_killed_run_continues_to_the_same_bits(verb, material, monkeypatch, tmp_path):
    import polymix.domains.text.task
    import polymix.workflows.compare.report
    import polymix.workflows.compare.run
    import polymix.workflows.convert.run  # noqa: F401

    torch.set_num_threads(1)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes((material / "text.txt").read_bytes())
    (tmp_path / "vit.py").write_text(VIT)
    began = time.monotonic()
    _, status = os.waitpid(start([*COMMANDS[verb], "--out", "whole"]), 0)
    seconds = time.monotonic() - began
    assert os.waitstatus_to_exitcode(status) == 0
    wanted, moments, killed = bits(verb, tmp_path / "whole"), random.Random(verb), 0
    for place in range(KILLS):
        out = f"killed-{place}"
        pid = start([*COMMANDS[verb], "--out", out])
        time.sleep(seconds * moments.random())
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        killed += os.waitstatus_to_exitcode(status) == -signal.SIGKILL
        _, status = os.waitpid(start([*COMMANDS[verb], "--out", out, "--resume"]), 0)
        assert os.waitstatus_to_exitcode(status) == 0, f"place {place}"
        assert bits(verb, tmp_path / out) == wanted, f"place {place}"
    print(f"{verb}: {killed} of {KILLS} runs were killed before their end, after up to {seconds:.1f} s")
    assert killed
