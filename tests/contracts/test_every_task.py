"""What every task promises in training: kill -9 and resume, two processes, all options at once, converted weights."""

import json
import os
import signal
from unittest.mock import patch

import pytest
import torch
from matplotlib.figure import Figure

from polymix import convert, save_pretrained
from polymix.cli import main
from polymix.train.registry import OWN_RECIPES, named_recipe
from polymix.train.run import train
from polymix.train.saved import SavedRun
from tests.domains.texts import folder as text_files
from tests.helpers import save_blank
from tests.processes import die_after, fork, statuses, torchrun

# The runs here must have the bits of those in processes of their own, which know nothing of the tests' thresholds.
pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("real_thresholds")]
STEPS = 4
DRAW = Figure.savefig  # before a test makes it blank
COMMON = ("control=False", f"steps={STEPS}", "log_every=1", "evaluate_every=2", "checkpoint_every=2")
# Others: a picture of their data.
PREDICTED = {
    "classify": None,
    "generation": None,
    "recall": None,
    "text": None,
    "satellite": "*.npy",
    "segment3d": "*.bin",
    "detect3d": "*.pcd.bin",
    "timeseries": "*.tsf",
    "timeseries goal=anomalies": "*.txt",
    "timeseries goal=classes": "*.ts",
    "video": "*.npy",
    "speech": "*.flac",
    "speech goal=best_rq": None,
    "depth": "images/**/*.png",
}
BY_HALVES = {"detect3d", "faces", "handwriting", "segment3d"}  # batch norm over each half, or Lovász-softmax
# A recipe whose options choose between several tasks promises all of this of each.
DOMAINS = sorted((*OWN_RECIPES, "timeseries goal=anomalies", "timeseries goal=classes", "speech goal=best_rq"))
# `text` has its own tests, and `instances` draws boxes by chance.
TWO = tuple(domain for domain in DOMAINS if domain not in ("instances", "text"))
CONVERTED = ("classify", "detect", "satellite", "jigsaw")  # whose hosts have attention to replace, and can be saved
EVERYTHING = ("accumulate=2", "ema=0.8", "clip=0.5", "precision=bfloat16")


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    """Where each domain keeps the data that it makes; the texts of `text`."""
    root = tmp_path_factory.mktemp("data")
    text_files(root / "texts")
    return root


def recipe_of(domain, data, *words):
    domain, *choice = domain.split()
    recipe = named_recipe(domain).preset("tiny")
    texts = (f"data={data / 'texts'}", "held_out=0.2") if domain == "text" else ()
    words = (*COMMON, *choice, *texts, *words)
    return recipe.changed(**dict(word.split("=", 1) for word in words))  # the last counts


def everything(domain):
    """`recall` has one batch a step, of all sizes, and no parts."""
    return tuple(word for word in EVERYTHING if domain != "recall" or not word.startswith("accumulate"))


def run(domain, data, out, words=(), *, resume=False, environment=None, dies_at=None, draws=False):
    """A run, with blank pictures unless it `draws`; in a process of its own if it has an environment or dies, by SIGKILL, which nothing can answer."""
    os.environ.update(environment or {})
    if dies_at is not None:
        die_after(dies_at - 1)
    with patch("matplotlib.figure.Figure.savefig", DRAW if draws else save_blank):
        train(recipe_of(domain, data, *words), out, resume=resume, data_folder=data / domain)


def processes(*runs):
    """Each of the runs in a process of its own, at once; their exit statuses."""
    return statuses([fork(run, *args, **options) for args, options in runs])


def rows(out):
    journal = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if not key.endswith("_per_second")} for row in journal]


def weights(out):
    """The model and its average, as the last checkpoint has them."""
    models = torch.load(out / "checkpoint" / "last.ckpt", weights_only=True)["models"]
    return {f"{name}.{key}": value for name, state in models.items() for key, value in state.items()}


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


@pytest.fixture(scope="module")
def whole(data, tmp_path_factory):
    """The folder of a domain's run that nothing interrupted, with every option that has a state; trained once."""
    made = {}

    def folder(domain):
        if domain not in made:
            made[domain] = tmp_path_factory.mktemp(domain) / "whole"
            run(domain, data, made[domain], (*everything(domain), "logger=tensorboard"), draws=True)
        return made[domain]

    return folder


@pytest.mark.parametrize("domain", DOMAINS)
def test_a_killed_run_is_resumed_to_the_same_bits(domain, data, whole, tmp_path):
    """With everything that has a state: averaged weights, accumulated gradients, lower precision."""
    words = everything(domain)
    assert processes(((domain, data, tmp_path / "killed", words), {"dies_at": STEPS})) == [-signal.SIGKILL]
    assert rows(tmp_path / "killed")[-1]["step"] == STEPS - 1, "after the checkpoint and before the end"
    run(domain, data, tmp_path / "killed", words, resume=True)
    assert rows(tmp_path / "killed") == rows(whole(domain))
    one, two = weights(whole(domain)), weights(tmp_path / "killed")
    assert list(one) == list(two) and all(torch.equal(one[name], two[name]) for name in one)
    assert any(name.startswith("average.") for name in one)


@pytest.mark.parametrize("domain", TWO)
@pytest.mark.skipif(not torch.distributed.is_available(), reason="untested: two processes, for torch.distributed")
def test_two_processes_learn_as_one(domain, data, tmp_path):
    run(domain, data, tmp_path / "one")
    both = [((domain, data, tmp_path / "both"), {"environment": environment}) for environment in torchrun(2)]
    assert processes(*both) == [0, 0]
    losses, expected = ([row["loss"] for row in rows(tmp_path / name) if "loss" in row] for name in ("both", "one"))
    close = 0.02 if domain in BY_HALVES else 1e-4
    assert losses[0] == pytest.approx(expected[0], rel=close), "the first batch, in two halves"
    assert len(losses) == STEPS and losses[-1] == pytest.approx(expected[-1], rel=0.05)


@pytest.mark.parametrize("domain", DOMAINS)
def test_all_options_at_once_and_what_the_folder_is_good_for(domain, data, whole, tmp_path, capsys):
    out = whole(domain)
    content = json.loads((out / "results.json").read_text())
    (row,) = content["rows"]
    assert content["finished"] and row["steps"] == STEPS and row["metrics"]
    assert all(type(value) is float for value in row["metrics"].values()), "not finite"
    assert list((out / "logs").glob("events.*")) and (out / "report.html").is_file()
    norms = [found["gradient_norm"] for found in rows(out) if "gradient_norm" in found]
    assert len(norms) == STEPS
    status, said, error = command(capsys, "evaluate", out, "--json")
    assert status == 0, error
    assert json.loads(said)["metrics"]
    pattern = PREDICTED.get(domain, "*.png")
    if pattern is None:
        return
    files = sorted((data / domain).rglob(pattern)) or sorted((data / domain).rglob("*.jpg"))
    file = next(path for path in files if "TARGET" not in path.name and "Parcel" not in path.name)
    status, _, error = command(capsys, "predict", out, file, "--out", tmp_path / "seen")
    assert status == 0, error
    assert len(json.loads((tmp_path / "seen" / "predictions.json").read_text())["results"]) == 1


@pytest.mark.parametrize("domain", DOMAINS)
def test_init_takes_the_folder_of_another_run(domain, data, whole, tmp_path):
    """Of each domain: training goes on from the weights that a run has saved, and not from fresh ones."""
    words = (f"init={whole(domain)}", "steps=1", "learning_rate=1e-9")
    run(domain, data, tmp_path / "on", words)
    models = (SavedRun.of(folder).load() for folder in (tmp_path / "on", whole(domain)))
    weights, expected = (dict(model.named_parameters()) for model in models)
    assert list(weights) == list(expected)
    assert all(torch.allclose(weights[name], expected[name], atol=1e-6) for name in expected)


@pytest.mark.parametrize("domain", CONVERTED)
def test_init_takes_the_folder_of_a_converted_model(domain, data, tmp_path):
    """Trained with attention, converted, saved, and trained on: the first weights are those of the folder."""
    run(domain, data, tmp_path / "attention", ("mixer=softmax", "steps=1"))
    model = SavedRun.of(tmp_path / "attention").load()
    convert(model, "pom", init="fresh")
    save_pretrained(model, tmp_path / "converted")
    run(domain, data, tmp_path / "on", ("mixer=pom", f"init={tmp_path / 'converted'}", "steps=1", "learning_rate=1e-9"))
    weights = SavedRun.of(tmp_path / "on").load().state_dict()
    expected = {name.replace(".mixer.mixer.", ".mixer."): value for name, value in model.state_dict().items()}
    assert set(weights) == set(expected)
    assert all(torch.allclose(weights[name], expected[name], atol=1e-6) for name in expected)
