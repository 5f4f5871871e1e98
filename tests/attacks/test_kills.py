"""Runs that are killed (-9) at a random moment and resumed: the same bits as the run that was not killed.

A moment is just before one of the changes of files that a run makes from its first results.json on: no clock decides it.
A search is also killed in each of its stages.
"""

import itertools
import json
import os
import random
import signal
import sys
from pathlib import Path

import pytest

from polymix.cli import main
from polymix.convert.trained import TrainedPlan
from polymix.train.distill.stages import Stage
from polymix.workflows.search import page, stages
from polymix.workflows.search.damage import Damage
from tests.attacks.test_files import TRAIN
from tests.helpers import slow_but
from tests.processes import fork, silent, statuses
from tests.workflows.search.helpers import fixed_times

CHANGES = {"os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.truncate"}
VIT = """
from polymix import SoftmaxConfig
from polymix.models import VisionTransformer


def build():
    import torch

    torch.manual_seed(0)
    return VisionTransformer(
        SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=8, depth=2, classes=10, channels=1
    )
"""
COMMANDS = {
    "train": [word.replace("steps=4", "steps=12") for word in TRAIN[:-2]],
    "convert": ["convert", "--model", "vit.py:build", "--plan", "pom", "--data", "digits", "--distill-epochs", "2",
                "--seconds", "0.05", "--lengths", "1", "--threads", "1"],
    "search": ["search", "--model", "vit.py:build", "--data", "digits", "--mixers", "qt,pom,keep", "--budget", "0.5", "--steps",
               "3", "--threads", "1"],
    "compare": ["compare", "--epochs", "1", "--seeds", "1", "--tokens", "16", "--threads", "1", "--mixers", "pom,linear_floor",
                "--data", "digits", "--set", "dim=8", "--set", "depth=1"],
}  # fmt: skip


def command(arguments, dies_at=None, noted=None):
    """Run a command; die at a moment, or note in a file how many there are. Times are the same in all searches."""
    silent()
    stages.layer_times = fixed_times
    moments = itertools.count(1)
    begun = False

    def count(event, details):
        nonlocal begun
        begun = begun or (event == "os.rename" and Path(os.fsdecode(details[1])).name == "results.json")
        changes = event in CHANGES or (event == "open" and details[2] & (os.O_WRONLY | os.O_RDWR))
        if begun and changes and "__pycache__" not in str(details[0]) and next(moments) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    try:
        main(arguments)
    finally:
        if noted:
            Path(noted).write_text(str(next(moments)))


STAGES = {
    "times": (stages, "layer_times"), "damages": (Damage, "__call__"), "training": (Stage, "after_step"),
    "plan": (TrainedPlan, "save"), "page": (page, "write"), "end": (stages.shutil, "rmtree"),
}  # fmt: skip


def stage(arguments, name, dies_at=None, noted=None):
    """Run a command; die in a call of a stage's function, or note in a file how many there are."""
    silent()
    stages.layer_times = fixed_times
    place, function = STAGES[name]
    own, calls = getattr(place, function), itertools.count(1)

    def counted(*arguments, **options):
        if next(calls) == dies_at:
            os.kill(os.getpid(), signal.SIGKILL)
        return own(*arguments, **options)

    setattr(place, function, counted)
    try:
        main(arguments)
    finally:
        if noted:
            Path(noted).write_text(str(next(calls) - 1))


def ended(arguments, *place, run=command, **options):
    """The exit status of a command in a process of its own."""
    return statuses([fork(run, arguments, *place, **options)])[0]


def bits(verb, out):
    """What must not differ: the weights, or the accuracies and losses."""
    content = json.loads((out / "results.json").read_text())
    assert content["finished"]
    if verb == "compare":
        return [(row["mixer"], row["seed"], row["metrics"]) for row in content["rows"]]
    from safetensors.torch import load_file

    assert not list(out.rglob("*.part"))
    if verb == "search":
        parts = {name: content[name] for name in ("times", "damages", "front", "points", "rules", "headline")}
        return parts, (out / "plan.json").read_bytes(), (out / "parts.safetensors").read_bytes()
    return {name: tensor.numpy().tobytes() for name, tensor in load_file(out / "model.safetensors").items()}


@pytest.mark.parametrize("verb", slow_but([verb for verb in COMMANDS if verb != "compare"], COMMANDS, ()))
@pytest.mark.parametrize(
    "kills", [pytest.param(1, marks=pytest.mark.slow), pytest.param(9, marks=pytest.mark.exhaustive)]
)
def test_a_killed_run_continues_to_the_same_bits(verb, kills, material, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_bytes((material / "text.txt").read_bytes())
    (tmp_path / "vit.py").write_text(VIT)
    assert ended([*COMMANDS[verb], "--out", "whole"], noted="moments") == 0
    whole, moments, killed = bits(verb, tmp_path / "whole"), random.Random(verb), 0
    for place in range(kills):
        out = f"killed-{place}"
        moment = moments.randint(1, int(Path("moments").read_text()))
        killed += ended([*COMMANDS[verb], "--out", out], dies_at=moment) == -signal.SIGKILL
        assert ended([*COMMANDS[verb], "--out", out, "--resume"]) == 0, f"killed at {moment}"
        assert bits(verb, tmp_path / out) == whole, f"killed at {moment}"
    assert killed


@pytest.mark.parametrize("name", slow_but((), STAGES, ("training", "plan")))
def test_a_search_that_is_killed_in_any_stage_continues_to_the_same_bits(name, monkeypatch, tmp_path):
    """In the first, the middle and the last call of what each stage repeats; before the first, nothing may be there."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "vit.py").write_text(VIT)
    search = [*COMMANDS["search"], "--out"]
    assert ended([*search, "whole"], name, run=stage, noted="calls") == 0
    whole, calls = bits("search", tmp_path / "whole"), int(Path("calls").read_text())
    for call in sorted({1, (calls + 1) // 2, calls}):
        out = f"killed-{call}"
        assert ended([*search, out], name, run=stage, dies_at=call) == -signal.SIGKILL
        assert ended([*search, out, "--resume"]) == 0, f"killed at {call} of {calls}"
        assert bits("search", tmp_path / out) == whole, f"killed at {call} of {calls}"
        left = {path.name for path in (tmp_path / out).iterdir()}
        assert left == {path.name for path in (tmp_path / "whole").iterdir()}, f"killed at {call} of {calls}"
