"""Processes of torchrun share each sequence: the same losses and weights as one process, whoever holds the tokens.

The weights are averaged and clipping acts, so that each of them would show. Nothing is dropped: parts of a sequence
drop other tokens than the whole.
"""

import json
import os
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.domains.text.recipe import TextRecipe
from polymix.errors import OptionError, PolymixError
from polymix.train.registry import recipe_class
from polymix.train.run import check_recipe, train
from polymix.train.saved import SavedRun
from tests.domains.texts import folder as text_files
from tests.processes import fork, statuses, torchrun
from tests.train.test_elastic import STEPS, largest_difference, outcome, start

OPTIONS = {"dropout": 0.0, "mixers": ("pom:decay=2", "local", "linear"), "num_layers": 3, "positions": "learned"}
two_processes = pytest.mark.skipif(
    not torch.distributed.is_available(), reason="untested: two processes, for torch.distributed"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("shared")
    text_files(root / "texts")
    assert start(root, root / "whole", **OPTIONS) == [0]
    return root


def check(out, folder, bound=1e-4):
    """The weights, losses and measurements of a run, as those of one process."""
    (weights, rows), (expected, whole) = outcome(out), outcome(folder / "whole")
    assert largest_difference(weights, expected) < bound
    assert [row["step"] for row in rows if "loss" in row] == list(range(1, STEPS + 1))
    for name in ("loss", "gradient_norm", "val_loss"):
        mine, others = ([row[name] for row in each if name in row] for each in (rows, whole))
        assert mine == pytest.approx(others, rel=max(1e-4, bound)), name


@two_processes
@pytest.mark.slow
@pytest.mark.parametrize(("world", "shares", "more"), [
    (2, 2, {"accumulate": 2}), (4, 2, {"checkpointing": True}), (3, 3, {"precision": "bfloat16"}),
    (4, 2, {"strategy": "fsdp", "accumulate": 2}),
])  # fmt: skip
def test_shared_sequences_train_as_one_process_does(folder, tmp_path, world, shares, more):
    assert start(folder, tmp_path / "run", world, sequence_parallel=shares, **{**OPTIONS, **more}) == [0] * world
    check(tmp_path / "run", folder, 5e-2 if "precision" in more else 1e-4)


@two_processes
@pytest.mark.slow
def test_packed_segments_and_attention_are_shared_too(folder, tmp_path):
    options = {**OPTIONS, "packing": "segments", "mixers": ("pom", "softmax", "qt")}
    assert start(folder, tmp_path / "whole", **options) == [0]
    assert start(folder, tmp_path / "run", 3, sequence_parallel=3, **options) == [0] * 3
    check(tmp_path / "run", tmp_path)


@two_processes
@pytest.mark.slow
@pytest.mark.parametrize(("first", "then"), [((4, 4), (3, 3)), ((2, 2), (1, 1)), ((2, 1), (4, 2)), ((1, 1), (2, 2))])
def test_a_killed_run_goes_on_with_other_processes(folder, tmp_path, first, then):
    """(processes, of which so many share a sequence): the same samples in the same order."""
    (world, shares), (later, later_shares), out = first, then, tmp_path / "run"
    dead = [-signal.SIGKILL] * world
    assert start(folder, out, world, dies_at=4, sequence_parallel=shares, **OPTIONS) == dead
    assert json.loads((out / "metrics.jsonl").read_text().splitlines()[-1])["step"] == 4
    assert start(folder, out, later, sequence_parallel=later_shares, **OPTIONS) == [0] * later
    check(out, folder)


def train_tiny(domain, out, options, environment):
    """One process of a run of a domain's smallest preset."""
    os.environ.update(environment)
    train(recipe_class(domain).tiny().changed(control=False, **options), out, data_folder=out.parent / "data")


@two_processes
@pytest.mark.parametrize(("domain", "options"), [
    pytest.param("classify", {"mixer": "padre"}, marks=pytest.mark.slow),
    pytest.param("classify", {"mixer": "pom", "accumulate": 2}, marks=pytest.mark.slow),
    pytest.param("generation", {"mixer": "pom"}, marks=pytest.mark.slow),
    pytest.param("satellite", {"mixer": "padre"}, marks=pytest.mark.slow),
    pytest.param("segment3d", {"mixer": "qt"}, marks=pytest.mark.slow),
])  # fmt: skip
def test_domains_share_the_tokens_within_their_blocks(domain, options, tmp_path):
    for world in (1, 2):
        runs = [(domain, tmp_path / str(world), {**options, "sequence_parallel": world}, each)
                for each in torchrun(world)]  # fmt: skip
        assert statuses([fork(train_tiny, *run) for run in runs]) == [0] * world
    (_, rows), (_, whole) = outcome(tmp_path / "2"), outcome(tmp_path / "1")
    for name in ("loss", "gradient_norm"):  # Adam makes steps of rounding where a gradient is zero
        mine, others = ([row[name] for row in each if name in row] for each in (rows, whole))
        assert mine == pytest.approx(others, rel=2e-3) and mine, name


def predict_shared(folder, file, world, environment):
    """One process of `polymix predict` for one file."""
    os.environ.update(environment)
    SavedRun.of(folder).predict([file], folder.parent / f"seen-{world}", sequence_parallel=world)


@two_processes
@pytest.mark.slow
@pytest.mark.parametrize(("domain", "mixer", "pattern"), [
    ("classify", "padre", "*.png"), ("satellite", "padre", "S2_*.npy"), ("segment3d", "qt", "velodyne/*.bin"),
])  # fmt: skip
def test_two_processes_predict_what_one_predicts(domain, mixer, pattern, tmp_path):
    folder, options, random = tmp_path / "run", {"mixer": mixer}, np.random.default_rng(0)
    if domain == "classify":
        options["data"] = str(tmp_path / "data")
        for name in ("a/0", "a/1", "a/2", "b/0", "b/1", "b/2"):
            file = tmp_path / "data" / f"{name}.png"
            file.parent.mkdir(exist_ok=True, parents=True)
            Image.fromarray(random.integers(0, 255, (20, 20), dtype=np.uint8)).save(file)
    assert statuses([fork(train_tiny, domain, folder, options, {})]) == [0]
    file = min((tmp_path / "data").rglob(pattern))
    for world in (1, 2):
        runs = [(folder, file, world, each) for each in torchrun(world)]
        assert statuses([fork(predict_shared, *run) for run in runs]) == [0] * world
    (mine,), (other,) = (
        json.loads((tmp_path / f"seen-{world}" / "predictions.json").read_text())["results"] for world in (2, 1)
    )
    assert mine.keys() == other.keys()
    for name, value in other.items():
        number = isinstance(value, (float, dict))
        assert mine[name] == (pytest.approx(value, abs=1e-4) if number else value), name


def test_what_cannot_be_shared_is_refused_before_anything_is_read(monkeypatch):
    with pytest.raises(OptionError, match="a divisor of the number of processes"):
        check_recipe(TextRecipe(sequence_parallel=2))
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(OptionError, match="no sequence that processes can share"):
        check_recipe(recipe_class("faces")(sequence_parallel=2, batch_size=2))
    for domain in ("classify", "generation", "satellite", "segment3d"):
        with pytest.raises(PolymixError, match="xca"):
            check_recipe(
                recipe_class(domain).tiny().changed(mixer="xca", sequence_parallel=2, batch_size=2, accumulate=1)
            )
    for options, what in (({"mixer": "gated_delta"}, "gated_delta"), ({"mixer": "kda", "packing": "segments"}, "kda"),
                          ({"mixer": "pom", "short_conv": 4}, "short_conv")):  # fmt: skip
        with pytest.raises(PolymixError, match=what):
            check_recipe(TextRecipe.make({"sequence_parallel": 2, **options}))
