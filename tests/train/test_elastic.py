"""A run is cut into slices, not into processes: it goes on with another number of them, or sharded, to the same result.

Clipping is active, dropout acts, and the weights are averaged, so that each of them would show.
"""

import json
import os
import signal

import pytest
import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from polymix.domains.text.recipe import TextRecipe
from polymix.errors import OptionError, ResultsError
from polymix.train.place import slices_of
from polymix.train.run import train
from tests.domains.texts import folder as text_files
from tests.processes import die_after, fork, statuses, torchrun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not torch.distributed.is_available(), reason="untested: two processes, for torch.distributed"),
]
STEPS = 6
OPTIONS = {
    "held_out": 0.2, "num_layers": 2, "hidden_size": 16, "num_heads": 2, "vocab": 300, "context": 16, "dropout": 0.2,
    "batch_size": 8, "steps": STEPS, "clip": 0.1, "ema": 0.9, "prompts": (), "evaluate_tokens": 256, "log_every": 1,
    "evaluate_every": 3, "checkpoint_every": 2, "mixers": ("pom",),
}  # fmt: skip


def run(folder, out, options, environment, dies_at):
    """One process of a run."""
    os.environ.update(environment)
    if dies_at is not None:
        die_after(dies_at)
    recipe = TextRecipe.make({**OPTIONS, "data": str(folder / "texts"), **options})
    train(recipe, out, resume=(out / "checkpoint" / "last.ckpt").exists(), data_folder=folder / "data")


def start(folder, out, world=1, dies_at=None, **options):
    """A run on so many processes, as torchrun starts them; their exit statuses."""
    runs = ((folder, out, options, environment, dies_at) for environment in torchrun(world))
    return statuses([fork(run, *each) for each in runs])


def outcome(out):
    """The model and its average of the last checkpoint, and the rows of the journal without speeds."""
    content = torch.load(out / "checkpoint" / "last.ckpt", weights_only=True)
    if "shards" in content:
        dcp_to_torch_save(out / "checkpoint" / content["shards"], out / "whole.pt")
        content = torch.load(out / "whole.pt", weights_only=True)
    models = content["models"]
    rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    rows = [{key: value for key, value in row.items() if not key.endswith("_per_second")} for row in rows]
    return {f"{name}.{key}": value for name, state in models.items() for key, value in state.items()}, rows


def largest_difference(one, two):
    assert list(one) == list(two)
    return max((one[name] - two[name]).abs().max().item() for name in one)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("elastic")
    text_files(root / "texts")
    assert start(root, root / "two", accumulate=2) == [0]
    assert start(root, root / "four", accumulate=4) == [0]
    return root


@pytest.mark.parametrize(("first", "then"), [((1, 2), None), ((2, 1), None), ((2, 1), 1), ((1, 2), 2)])
def test_two_slices_give_the_same_bits_on_any_number_of_processes(folder, tmp_path, first, then):
    """(processes, parts of each), and on how many the run goes on after kill -9; a sum of two has one order."""
    (world, parts), out = first, tmp_path / "run"
    if then is None:
        assert start(folder, out, world, accumulate=parts) == [0] * world
    else:
        assert start(folder, out, world, accumulate=parts, dies_at=4) == [-signal.SIGKILL] * world
        assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
        assert start(folder, out, then, accumulate=parts if then == world else 1) == [0] * then
    (weights, rows), (expected, whole) = outcome(out), outcome(folder / "two")
    assert largest_difference(weights, expected) == 0
    steps, expected_steps = ([row for row in each if "loss" in row] for each in (rows, whole))
    assert steps == expected_steps
    measured, others = ([row["val_loss"] for row in each if "val_loss" in row] for each in (rows, whole))
    assert measured == pytest.approx(others, rel=1e-6), "an evaluation takes as many samples at once as a slice has"
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    norms = [row["gradient_norm"] for row in rows if "loss" in row]
    assert min(norms) > OPTIONS["clip"], "clipping would not show"


def test_four_slices_see_the_same_samples_and_are_equal_up_to_rounding(folder, tmp_path):
    """(a + b) + (c + d) is not ((a + b) + c) + d."""
    assert start(folder, tmp_path / "run", 2, accumulate=2) == [0, 0]
    (weights, rows), (expected, whole) = outcome(tmp_path / "run"), outcome(folder / "four")
    assert largest_difference(weights, expected) < 1e-4
    assert [row["loss"] for row in rows if "loss" in row] == pytest.approx(
        [row["loss"] for row in whole if "loss" in row], rel=1e-4)  # fmt: skip


@pytest.mark.parametrize(("first", "then"), [
    ((2, "fsdp"), None), ((2, "fsdp"), (1, "auto")), ((2, "fsdp"), (2, "auto")), ((1, "auto"), (2, "fsdp")),
    ((2, "fsdp"), (2, "fsdp"))])  # fmt: skip
def test_sharded_weights_are_those_of_one_process_up_to_rounding(folder, tmp_path, first, then):
    """FSDP2, whose norm is summed in another order; and killed, and gone on with sharded or whole: (processes, how)."""
    out, (world, strategy) = tmp_path / "run", first
    if then is None:
        assert start(folder, out, world, strategy=strategy) == [0] * world
    else:
        whole = {"accumulate": 2} if world == 1 else {}
        assert start(folder, out, world, strategy=strategy, dies_at=4, **whole) == [-signal.SIGKILL] * world
        assert (sorted(path.name for path in (out / "checkpoint").iterdir())
                == ["last.ckpt", *(["step-4"] if strategy == "fsdp" else [])]), "one file, or the last step's shards too"  # fmt: skip
        world, strategy = then
        assert start(folder, out, world, strategy=strategy) == [0] * world
    assert largest_difference(outcome(out)[0], outcome(folder / "two")[0]) < 1e-4


def test_shards_are_saved_after_an_evaluation_of_the_weights_that_learn(folder, tmp_path):
    """Without an average these are evaluated, which leaves the outermost part of the model whole."""
    assert start(folder, tmp_path / "run", 2, strategy="fsdp", ema=0.0, evaluate_every=2) == [0, 0]
    losses = [row["loss"] for row in outcome(tmp_path / "run")[1] if "loss" in row]
    assert losses == pytest.approx([row["loss"] for row in outcome(folder / "two")[1] if "loss" in row], rel=1e-4)


def test_averages_and_dropout_act(folder, tmp_path):
    """The averaged and the last weights differ, and a dropout that did not act would show in the loss."""
    weights, rows = outcome(folder / "two")
    pairs = [
        (weights[name], weights["average" + name.removeprefix("model")])
        for name in weights
        if name.startswith("model.")
    ]
    assert any((model - average).abs().max() > 1e-4 for model, average in pairs)
    assert start(folder, tmp_path / "run", accumulate=2, dropout=0.0) == [0]
    assert outcome(tmp_path / "run")[1] != rows


def test_slices_that_cannot_be_shared_are_refused():
    with pytest.raises(OptionError, match="a number of processes that divides 2"):
        slices_of(TextRecipe(), 3, {"slices": 2})


def test_a_checkpoint_of_something_else_is_refused(tmp_path):
    path = tmp_path / "run" / "checkpoint" / "last.ckpt"
    path.parent.mkdir(parents=True)
    torch.save({"step": 3}, path)
    text_files(tmp_path / "texts")
    with pytest.raises(ResultsError, match="cannot be read"):
        train(TextRecipe.make({**OPTIONS, "data": str(tmp_path / "texts")}), tmp_path / "run", resume=True)
