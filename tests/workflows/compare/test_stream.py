"""`polymix compare --data` with a folder that is too large for memory."""

from functools import partial

import pytest
import torch
from PIL import Image

from polymix.measure.harness import Budget
from polymix.train.data import images
from polymix.workflows.compare.run import compare
from polymix.workflows.compare.settings import Settings


class Quiet:
    def start(self, name, total):
        return lambda done: None


def photos(folder):
    for place, name in enumerate(("red", "blue")):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (20, 12), ((200, 10 + number, 0), (0, 10 + number, 200))[place]).save(
                folder / name / f"{number}.png"
            )
    return folder


@pytest.mark.parametrize("streamed", [False, True])
def test_folders_beyond_the_limit_are_streamed_learned_and_shown(tmp_path, monkeypatch, streamed):
    monkeypatch.setattr("polymix.workflows.compare.run.Budget", partial(Budget, timing_seconds=0.02))
    if streamed:
        monkeypatch.setattr(images, "MAX_BYTES", 100)
    settings = Settings(data=str(photos(tmp_path / "photos")), image_size=8, mixers="linear_floor", seeds=1, tokens=(4,),
                        threads=1, options=("steps=20", "batch_size=4", "learning_rate=0.01", "dim=8", "depth=1"))  # fmt: skip
    content = compare(settings, tmp_path / "out", Quiet()).content
    assert content["finished"] and content["data"]["channels"] == 3 and content["data"]["classes"] == ["blue", "red"]
    assert content["data"]["train"] + content["data"]["test"] == 20
    assert all(sample["image"].startswith("data:image/png") for sample in content["data"]["samples"])
    assert [row["metrics"]["accuracy"] for row in content["rows"]] == [1, 1]
    assert {row["mixer"] for row in content["answers"]} == {"softmax", "linear_floor"}
    for row in content["answers"]:
        assert torch.tensor(row["confusion"]).diagonal().sum() == content["data"]["test"]
        assert row["samples"] == [sample["class"] for sample in content["data"]["samples"]]
