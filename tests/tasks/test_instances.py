"""Instance segmentation: Mask R-CNN with a mixer in its backbone, from data to masks."""

import json

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.errors import DataError
from polymix.tasks import runner
from polymix.tasks.boxes.data import from_summary, load
from polymix.tasks.boxes.masks import decode
from polymix.tasks.instances import metrics
from polymix.tasks.instances.recipe import InstancesRecipe
from polymix.tasks.processes import Process
from polymix.tasks.saved import SavedRun
from tests.tasks.box_files import entry, write_coco

cure_torchvision()
pytest.importorskip("torchvision", reason="untested: Mask R-CNN, without torchvision")


def test_a_run_measures_masks_and_predicts_them(tmp_path, monkeypatch):
    runner.train(InstancesRecipe.tiny().changed(["control=False"]), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "results.json").read_text())["rows"][0]
    assert row["task"] == "instances" and row["mixer"] == "poly_nl:reduction=4"
    assert {"mask_AP", "AP"} <= set(row["metrics"]) and (tmp_path / "run" / "samples.png").exists()
    saved = SavedRun.of(tmp_path / "run")
    model = saved.load()
    assert "backbone.body.layer3.1.inserted_before" in "".join(model.state_dict())
    picture = next((tmp_path / "run" / "data" / "val").glob("*.png"))
    monkeypatch.setattr(metrics, "SHOWN", 0.0)
    with torch.no_grad():
        found = metrics.predict(
            model, from_summary(saved.recipe, saved.summary), saved.recipe, [picture], tmp_path, Process()
        )
    assert (tmp_path / found[0]["picture"]).exists()
    assert all(decode(thing["mask"], 64, 64).shape == (64, 64) for thing in found[0]["objects"])


def test_objects_without_a_mask_are_named(tmp_path):
    folder = write_coco(tmp_path, annotations=entry(0))
    with pytest.raises(DataError, match=r"b.png: 1 of 2 objects: has no segmentation"):
        load(InstancesRecipe(data=str(folder)), tmp_path, print)
    data = load(InstancesRecipe(data=str(folder), mistakes="skip"), tmp_path, print)
    assert data.train[1][1]["masks"].shape == (1, 64, 64)
