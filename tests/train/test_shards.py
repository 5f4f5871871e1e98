"""The sharded part of a checkpoint: it comes back whole, and a folder that is damaged or foreign runs no code."""

import os
import pickle

import pytest
import torch
from torch import nn

from polymix.errors import ResultsError
from polymix.train.resume import load_checkpoint, read_checkpoint, save_checkpoint

pytestmark = pytest.mark.skipif(not torch.distributed.is_available(), reason="untested: shards, for torch.distributed")
CONTENT = {"settings": {}, "step": 3, "slices": 1, "kept": {}, "scaler": {}, "task": {}}


def fresh(seed):
    """A model of which the second layer has had no gradient, its optimizer and schedule."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * seed)
    return model, optimizer, torch.optim.lr_scheduler.ConstantLR(optimizer)


def saved(path):
    model, optimizer, schedule = fresh(1)
    model[:2](torch.randn(5, 3)).sum().backward()
    optimizer.step()
    save_checkpoint(path, CONTENT, {"model": model}, optimizer, schedule, writes=True, sharded=True)
    return model, optimizer, schedule


def test_what_comes_back_is_what_was_saved(tmp_path):
    path = tmp_path / "last.ckpt"
    model, optimizer, schedule = saved(path)
    assert not read_checkpoint(path, "polymix train")["models"], "the weights would be there twice"
    other, other_optimizer, other_schedule = fresh(2)
    load_checkpoint(read_checkpoint(path, "polymix train"), {"model": other}, other_optimizer, other_schedule)
    assert all(torch.equal(value, other.state_dict()[name]) for name, value in model.state_dict().items())
    mine, theirs = other_optimizer.state_dict(), optimizer.state_dict()
    assert mine["param_groups"] == theirs["param_groups"] and mine["state"].keys() == theirs["state"].keys()
    assert all(torch.equal(mine["state"][i]["exp_avg"], theirs["state"][i]["exp_avg"]) for i in theirs["state"])
    save_checkpoint(path, {**CONTENT, "step": 4}, {"model": model}, optimizer, schedule, writes=True, sharded=True)
    assert [folder.name for folder in tmp_path.glob("step-*")] == ["step-4"], "shards of every step stay"
    save_checkpoint(path, {**CONTENT, "step": 5}, {"model": model}, optimizer, schedule, writes=True)
    assert not [*tmp_path.glob("step-*")], "shards that no file names stay"


class Foreign:
    def __reduce__(self):
        return os.mkdir, (os.environ["FOREIGN"],)


@pytest.mark.parametrize("damage", ["foreign", "cut", "no list", "no shard"])
def test_a_damaged_folder_is_refused_and_runs_nothing(tmp_path, monkeypatch, damage):
    path, shards = tmp_path / "last.ckpt", tmp_path / "step-3"
    saved(path)
    monkeypatch.setenv("FOREIGN", str(tmp_path / "made"))
    listed, (shard,) = shards / ".metadata", shards.glob("*.distcp")
    if damage == "foreign":
        listed.write_bytes(pickle.dumps(Foreign()))
    elif damage == "cut":
        shard.write_bytes(shard.read_bytes()[:-900])
    else:
        (listed if damage == "no list" else shard).unlink()
    model, optimizer, schedule = fresh(2)
    with pytest.raises(ResultsError, match="step-3, which cannot be read"):
        load_checkpoint(read_checkpoint(path, "polymix train"), {"model": model}, optimizer, schedule)
    assert not (tmp_path / "made").exists(), "code of the folder was run"
