"""A task from outside the package, of the six files on CONTRIBUTING.md, run by `polymix train` with all its options."""

import json
import re
import sys
import textwrap
from pathlib import Path

import pytest
import torch

from polymix.cli import main
from polymix.errors import ResultsError
from polymix.tasks.learner import Learner

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")
PARTS = {"recipe", "data", "model", "learner", "metrics"}


@pytest.fixture
def toy(tmp_path, monkeypatch):
    """The files as the page has them; the path of the recipe."""
    blocks = re.findall(r"```python\n( *# ([\w/]+\.py)\n.*?)```", PAGE, re.S)
    for text, name in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    assert {name for _, name in blocks} == {*(f"majority/{part}.py" for part in PARTS), "recipes/majority.py"}
    (tmp_path / "majority" / "__init__.py").touch()
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path / "recipes" / "majority.py"
    for name in [name for name in sys.modules if name.split(".")[0] == "majority"]:
        del sys.modules[name]


def run(capsys, *arguments):
    """Exit status, standard output and standard error."""
    with pytest.raises(SystemExit) as stop:
        main(["train", *map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


def weights(out):
    return torch.load(out / "model.pt", weights_only=True)


def rows(out):
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith("_per_second")} for row in rows]


def same(out, other):
    assert rows(out) == rows(other)
    assert all(torch.equal(value, weights(other)[name]) for name, value in weights(out).items())


def test_it_learns_and_leaves_results_a_report_and_pictures(toy, capsys):
    out = toy.parent / "out"
    status, said, _ = run(capsys, toy, "--out", out)
    assert status == 0 and "60 steps from 0" in said and "accuracy" in said
    results = json.loads((out / "results.json").read_text())
    assert results["finished"] and results["task"] == "majority" and results["settings"]["dim"] == 16
    assert results["metrics"]["accuracy"] > 0.9 and results["evaluations"][-1]["step"] == 60
    assert results["machine"]["torch"] == torch.__version__ and results["parameters"] > 1000
    report = (out / "report.md").read_text()
    assert "# Majority" in report and f"{100 * results['metrics']['accuracy']:.1f} %" in report
    pictures = re.findall(r"!\[.*\]\((.*)\)", report)
    assert pictures and all((out / name).read_bytes().startswith(b"\x89PNG") for name in pictures)


def test_set_changes_options_and_refuses_unknown_ones(toy, capsys):
    out = toy.parent / "out"
    status, _, _ = run(capsys, toy, "--out", out, "--set", "steps=3", "--set", "mixer=padre:kernel_size=3")
    settings = json.loads((out / "results.json").read_text())["settings"]
    assert status == 0 and (settings["steps"], settings["mixer"]) == (3, "padre:kernel_size=3")
    status, _, error = run(capsys, toy, "--out", toy.parent / "other", "--set", "lngth=3")
    assert status == 2 and "`lngth`: expected length" in error and not (toy.parent / "other").exists()


def test_data_is_the_task_s_own_and_what_it_refuses_is_one_line(toy, capsys):
    lines = toy.parent / "signs.txt"
    lines.write_text("++-\n--+\n+++\n---\n-+-\n" * 4)
    out = toy.parent / "out"
    status, _, _ = run(capsys, toy, "--data", lines, "--out", out, "--set", "steps=2", "--set", "batch_size=4")
    assert status == 0 and json.loads((out / "results.json").read_text())["settings"]["data"] == str(lines)
    status, _, error = run(capsys, toy, "--data", "/nowhere", "--out", toy.parent / "other")
    assert status == 2 and "`data`" in error and len(error.splitlines()) == 1 and not (toy.parent / "other").exists()


@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_resumed_run_gives_the_same_bits(toy, capsys, monkeypatch, step):
    """Stopped before the first checkpoint, between two, at the end; in the middle of a step that has two parts."""
    options = []
    for word in ("steps=8", "checkpoint_every=3", "accumulate=2", "ema=0.8", "evaluate_every=3", "log_every=1"):
        options += ["--set", word]
    whole, out, own = toy.parent / "whole", toy.parent / "out", Learner.training_step

    def stop(self, batch, index):
        if self.global_step + 1 == step and index % 2:
            raise KeyboardInterrupt
        return own(self, batch, index)

    assert run(capsys, toy, "--out", whole, *options)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "training_step", stop)
        status, said, _ = run(capsys, toy, "--out", out, *options)
    assert status == 130 and ("--resume" if step > 3 else "run the same command again") in said
    status, _, error = run(capsys, toy, "--out", out, *options) if step > 3 else (2, "", "--resume")
    assert status == 2 and "resume" in error, "a checkpoint would have been overwritten"
    (out / ".metrics.jsonl.killed.part").write_text("half of a file, of a run that was killed")
    assert run(capsys, toy, "--out", out, *options, "--resume")[0] == 0
    assert not list(out.rglob("*.part"))
    same(whole, out)


def test_epochs_tell_the_steps_by_the_length_of_the_data(toy, capsys):
    lines, out = toy.parent / "signs.txt", toy.parent / "out"
    lines.write_text("++-\n--+\n+++\n---\n-+-\n" * 4)  # 16 of the 20 are for training
    options = ("--data", lines, "--set", "batch_size=6", "--set", "epochs=2.5", "--out", out)
    assert run(capsys, toy, *options)[0] == 0
    settings = json.loads((out / "results.json").read_text())["settings"]
    assert settings["steps"] == rows(out)[-1]["step"] == 7, "ceil(2.5 · 16 / 6)"
    assert rows(out)[-2]["learning_rate"] < 1e-3, "the schedule would be that of another number of steps"
    assert run(capsys, toy, *options, "--resume")[0] == 0
    status, _, error = run(capsys, toy, *options, "--set", "steps=7")
    assert status == 2 and "both epochs=2.5 and steps" in error


def test_another_recipe_or_other_data_is_not_resumed(toy, capsys):
    out, lines = toy.parent / "out", toy.parent / "signs.txt"
    run(capsys, toy, "--out", out, "--set", "steps=2")
    status, _, error = run(capsys, toy, "--out", out, "--set", "steps=3", "--resume")
    assert status == 2 and "expected steps=3" in error and "steps=2" in error
    lines.write_text("++-\n--+\n+++\n---\n-+-\n" * 4)
    status, _, error = run(capsys, toy, "--out", out, "--set", "steps=2", "--data", lines, "--resume")
    assert status == 2 and "other data" in error


def test_a_task_without_one_of_its_files_says_which(toy, capsys):
    (toy.parents[1] / "majority" / "metrics.py").unlink()
    status, _, error = run(capsys, toy, "--out", toy.parent / "out")
    assert status == 2 and "metrics.py" in error
    (toy.parents[1] / "majority" / "metrics.py").write_text("")
    status, _, error = run(capsys, toy, "--out", toy.parent / "out")
    assert status == 2 and "majority.metrics without measure" in error


def test_initial_weights_are_read_once(tmp_path, monkeypatch):
    """The check before any data maps the file; the numbers are read when the model exists."""
    from polymix.tasks.initial import check_weights, load_weights

    model = torch.nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    mapped, load = [], torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, mmap=False, **options: mapped.append(mmap) or load(*args, mmap=mmap, **options)
    )
    check_weights(tmp_path)
    load_weights(torch.nn.Linear(2, 3), tmp_path)
    assert mapped == [True, False]
    whole = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResultsError, match="cannot be read"):
        check_weights(tmp_path)
