"""A domain from outside the package, of the two files in CONTRIBUTING.md, run by `polymix train` with all its options."""

import json
import re
import shutil
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from polymix.cli import main
from polymix.errors import DataError, OptionError, ResultsError
from polymix.train import registry
from polymix.train.loop import Learner
from polymix.train.saved import SavedRun
from polymix.train.task import Metric
from polymix.workflows.compare import report, settings
from polymix.workflows.compare.run import compare
from polymix.workflows.evaluate import Settings, evaluate

PAGE = (Path(__file__).parents[2] / "CONTRIBUTING.md").read_text("utf-8")


@pytest.fixture
def package(tmp_path, monkeypatch):
    """The folder with the files as the page has them, as if it were installed with its entry point."""
    blocks = re.findall(r"```(?:python|toml)\n( *# ([\w/]+\.py)\n.*?)```", PAGE, re.S)
    assert {name for _, name in blocks} == {"majority/recipe.py", "majority/task.py"}
    for text, name in blocks:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(textwrap.dedent(text))
    (tmp_path / "majority" / "__init__.py").touch()
    (line,) = re.findall(r'^ *(majority = ".*")$', PAGE, re.M)
    about = tmp_path / "majority-1.0.dist-info"
    about.mkdir()
    (about / "METADATA").write_text("Metadata-Version: 2.1\nName: majority\nVersion: 1.0\n")
    (about / "entry_points.txt").write_text(f"[polymix.tasks]\n{line.replace(chr(34), '')}\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name.split(".")[0] == "majority"]:
        del sys.modules[name]


@pytest.fixture
def toy(package):
    """A file that sets the recipe."""
    path = package / "recipes" / "majority.py"
    path.parent.mkdir()
    path.write_text("from majority.recipe import MajorityRecipe\n\nrecipe = MajorityRecipe(learning_rate=3e-3)\n")
    return path


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


@pytest.mark.draws
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
    assert (
        status == 2
        and "`lngth` is an unknown option. Choose from length" in error
        and not (toy.parent / "other").exists()
    )


def test_data_is_the_task_s_own_and_what_it_refuses_is_one_line(toy, capsys):
    lines = toy.parent / "signs.txt"
    lines.write_text("++-\n--+\n+++\n---\n-+-\n" * 4)
    out = toy.parent / "out"
    status, _, _ = run(capsys, toy, "--data", lines, "--out", out, "--set", "steps=2", "--set", "batch_size=4")
    assert status == 0 and json.loads((out / "results.json").read_text())["settings"]["data"] == str(lines)
    status, _, error = run(capsys, toy, "--data", "/nowhere", "--out", toy.parent / "other")
    assert status == 2 and "`--data`" in error and len(error.splitlines()) == 1 and not (toy.parent / "other").exists()
    lines.write_text("++-\n")  # of which 0 of 1 are for training
    status, _, error = run(capsys, toy, "--data", lines, "--out", toy.parent / "other")
    assert status == 2 and "expected training samples" in error and len(error.splitlines()) == 1


@pytest.mark.parametrize("step", [1, 4, 8])
def test_a_resumed_run_gives_the_same_bits(toy, capsys, monkeypatch, step):
    """Stopped before the first checkpoint, between two, at the end; in the middle of a step that has two parts."""
    options = []
    for word in ("steps=8", "checkpoint_every=3", "accumulate=2", "ema=0.8", "evaluate_every=3", "log_every=1"):
        options += ["--set", word]
    whole, out, own = toy.parent / "whole", toy.parent / "out", Learner.forward
    calls = []

    def stop(self, batch, counts):
        calls.append(batch)
        if len(calls) == 2 * step:  # a step has two slices
            raise KeyboardInterrupt
        return own(self, batch, counts)

    assert run(capsys, toy, "--out", whole, *options)[0] == 0
    with monkeypatch.context() as patch:
        patch.setattr(Learner, "forward", stop)
        status, said, _ = run(capsys, toy, "--out", out, *options)
    assert status == 130 and ("--resume" if step > 3 else "run the same command again") in said
    status, _, error = run(capsys, toy, "--out", out, *options) if step > 3 else (2, "", "--resume")
    assert status == 2 and "resume" in error, "a checkpoint would have been overwritten"
    out.mkdir(exist_ok=True)  # an interrupted run leaves no empty folder
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
    assert status == 2 and "expected a run with steps=3, got" in error and "of a run with steps=2" in error
    lines.write_text("++-\n--+\n+++\n---\n-+-\n" * 4)
    status, _, error = run(capsys, toy, "--out", out, "--set", "steps=2", "--data", lines, "--resume")
    assert status == 2 and "other data" in error


def test_an_installed_domain_is_known_by_its_name(package, capsys):
    status, said, _ = run(capsys, "majority", "--preset", "tiny", "--length", "7", "--out", package / "out")
    assert status == 0, said
    content = json.loads((package / "out" / "results.json").read_text())
    assert content["settings"]["length"] == 7 and content["rows"][0]["task"] == "majority"
    status, said, _ = run(capsys, "majority", "--help")
    assert status == 0 and "--length" in said and "signs in a sequence" in said and "majority of a sequence" in said
    status, _, error = run(capsys, "majorty", "--out", package / "other")
    assert status == 2 and "Did you mean majority?" in error


def test_a_domain_that_cannot_be_loaded_is_one_line_that_names_its_package(package, capsys):
    """And harmless until it is named."""
    (package / "majority" / "recipe.py").write_text("import nowhere_to_be_found\n")
    status, _, error = run(capsys, "majority", "--out", package / "out")
    assert status == 2 and "of the package majority" in error and len(error.splitlines()) == 1
    assert run(capsys, "recall", "--help")[0] == 0


def test_a_domain_named_as_one_of_polymix_is_not_used(package):
    entries = package / "majority-1.0.dist-info" / "entry_points.txt"
    entries.write_text(entries.read_text() + "text = majority.recipe:MajorityRecipe\n")
    assert registry.recipe_class("text").__name__ == "TextRecipe" and registry.shadowed() == {"text": "majority"}


@pytest.mark.parametrize("method", ["load", "build", "loss", "measure"])
def test_a_task_that_lacks_a_method_says_which(package, capsys, method):
    path = package / "majority" / "task.py"
    path.write_text(path.read_text().replace(f"def {method}(", f"def no_{method}("))
    with pytest.raises(TypeError, match=method):
        main(["train", "majority", "--out", str(package / "out"), "--threads", "1"])


def rewrite(path, *changes):
    text = path.read_text()
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)


@pytest.mark.parametrize(("old", "new", "message"), [
    ('name = "majority"', "", "has no name"),
    ('unit="%"),)', 'unit="%"))', "instead of a tuple of Metric"),
    ('{"accuracy":', '{"certainty":', "'certainty', which its metrics do not declare"),
    (".mean().item()}", ".mean()}", r"return \.item\(\)"),
], ids=["name", "metrics", "undeclared", "tensor"])  # fmt: skip
def test_what_a_task_says_wrongly_of_its_metrics_ends_the_run_before_it_is_lost(package, old, new, message):
    """At the first measurement at the latest, and not at the end of a training of which nothing is written."""
    rewrite(package / "majority" / "task.py", (old, new))
    with pytest.raises(TypeError, match=message):
        main(["train", "majority", "--out", str(package / "out"), "--set", "evaluate_every=1", "--threads", "1"])
    journal = package / "out" / "metrics.jsonl"
    assert not journal.exists() or len(journal.read_text().splitlines()) < 60


def test_a_metric_has_a_direction_that_exists():
    """Any other word would count as "lower", and a comparison would praise the worst mixer."""
    with pytest.raises(OptionError, match="`better of the metric accuracy`: expected 'higher', 'lower', got 'up'"):
        Metric("accuracy", better="up")


@pytest.mark.parametrize(("file", "old", "new", "message"), [
    ("task.py", 'name = "majority"', 'name = "votes"', "`task`: expected the name of its entry point, 'majority', got"),
    ("recipe.py", ":MajorityTask", ":MajorTask", "has no attribute 'MajorTask'"),
    ("recipe.py", "majority.task:", "majority.tusk:", "No module named 'majority.tusk'"),
], ids=["name", "class", "module"])  # fmt: skip
def test_a_task_that_could_not_be_found_again_is_not_trained(package, capsys, file, old, new, message):
    """A saved run is found by its task's name: with another one it could be neither evaluated nor used."""
    rewrite(package / "majority" / file, (old, new))
    status, _, error = run(capsys, "majority", "--out", package / "out")
    assert status == 2 and message in error and len(error.splitlines()) == 1 and not (package / "out").exists()


def test_a_run_of_a_domain_that_is_not_installed_says_so(toy, capsys):
    shutil.rmtree(toy.parents[1] / "majority-1.0.dist-info")
    out = toy.parent / "out"
    assert run(capsys, toy, "--out", out, "--set", "steps=1")[0] == 0
    with pytest.raises(ResultsError, match=r"expected a run of a domain that is installed, got .* domain majority"):
        SavedRun.of(out)


@pytest.fixture
def classifier(package):
    """The task with classes, which its data name."""
    rewrite(
        package / "majority" / "task.py",
        ('    name = "majority"\n', '    name = "majority"\n    answers = True\n    unit = "signs"\n'),
        ("    test: TensorDataset\n", "    test: TensorDataset\n\n    def summary(self):\n"
         '        labels = torch.cat([self.train.tensors[1], self.test.tensors[1]]).unique().tolist()\n'
         '        return {"classes": [("minus", "plus")[label] for label in labels]}\n'),
        ("    def measure(", "    def details(self, model, data, process):\n        x, y = data.test.tensors\n"
         '        labels = {"labels": y.tolist(), "predictions": model(x).argmax(1).tolist()}\n'
         '        return {"metrics": self.measure(model, data, process), "count": len(y), **labels}\n\n'
         "    def measure("),
    )  # fmt: skip
    return package


def test_other_classes_than_the_model_s_are_not_measured(classifier, capsys):
    """Their labels would be numbers of other classes."""
    out, lines = classifier / "out", classifier / "signs.txt"
    assert run(capsys, "majority", "--out", out, "--set", "steps=1")[0] == 0
    lines.write_text("++-\n--+\n" * 5)
    evaluation = evaluate(Settings(out, data=str(lines)))
    assert (evaluation.count, evaluation.unit) == (2, "signs")
    lines.write_text("++-\n" * 5)
    with pytest.raises(DataError, match="expected data of the model's classes, minus, plus, got data of plus"):
        evaluate(Settings(out, data=str(lines)))


def test_compare_shows_the_answers_of_a_task_that_is_not_of_pictures(classifier):
    progress = SimpleNamespace(start=lambda name, total: lambda done: None)
    asked = settings.Settings("majority", mixers="linear_floor", seeds=1, options=("steps=1",), threads=1)
    content = compare(asked, classifier / "out", progress).content
    data = content["data"]
    assert (data["classes"], data["train"], data["test"]) == (["minus", "plus"], 320, 80) and not data["samples"]
    assert [sum(map(sum, row["confusion"])) for row in content["answers"]] == [80, 80]
    report.write_report(content, classifier / "out")
    assert "would be right for" in (classifier / "out" / "report.html").read_text("utf-8")


def test_initial_weights_are_read_once(tmp_path, monkeypatch):
    """The check before any data maps the file; the numbers are read when the model exists."""
    from polymix.train.initial import load_weights, read_weights

    model = torch.nn.Linear(2, 3)
    torch.save(model.state_dict(), tmp_path / "model.pt")
    mapped, load = [], torch.load
    monkeypatch.setattr(
        torch, "load", lambda *args, mmap=False, **options: mapped.append(mmap) or load(*args, mmap=mmap, **options)
    )
    read_weights(tmp_path, mmap=True)
    load_weights(torch.nn.Linear(2, 3), tmp_path)
    assert mapped == [True, False]
    whole = (tmp_path / "model.pt").read_bytes()
    (tmp_path / "model.pt").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ResultsError, match="cannot be read"):
        read_weights(tmp_path, mmap=True)
