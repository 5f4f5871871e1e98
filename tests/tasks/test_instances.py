"""Instance segmentation: Mask R-CNN with a mixer in its backbone, from data to masks."""

import io
import json
import zipfile

import numpy as np
import pytest
import torch
from PIL import Image

from polymix.compat import cure_torchvision
from polymix.errors import DataError
from polymix.tasks import runner
from polymix.tasks.boxes.masks import decode
from polymix.tasks.instances import metrics
from polymix.tasks.instances.data import check, for_evaluation, from_summary, load
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


def write_nuclei(path, labels, size=(128, 128)):
    """A wheel with stardist's two pictures."""
    with zipfile.ZipFile(path, "w") as wheel:
        for name, values in (("img2d.tif", (labels > 0) * 180 + 8), ("mask2d.tif", labels)):
            file = io.BytesIO()
            Image.frombytes("I;16", size, values.astype("<u2").tobytes()).save(file, "TIFF")
            wheel.writestr(f"stardist/data/images/{name}", file.getvalue())
    return path


def test_nuclei_of_a_wheel_are_crops_left_and_right(tmp_path):
    labels = np.zeros((128, 128), int)
    labels[4:14, 4:12], labels[40:52, 100:112], labels[70:74, 94:98] = 7, 9, 11  # the last is cut into two columns
    wheel = write_nuclei(tmp_path / "stardist.whl", labels)
    recipe = InstancesRecipe(data=str(wheel), image_size=32)
    found = load(recipe, tmp_path / "crops", print)
    assert found.classes == ("nucleus",) and found.name == "the nuclei of stardist.whl"
    assert (len(found.train), len(found.test)) == (13 * 9, 4)
    assert [len(picture.things) for picture in found.test.pictures.pictures] == [0, 1, 0, 0]
    assert found.test[1][1]["masks"].sum() == 144 and found.test[1][1]["boxes"].tolist() == [[4, 8, 16, 20]]
    assert found.train[0][1]["masks"].sum() == 80 and found.train[0][0].max() > 2 * found.train[0][0].float().mean()
    again = for_evaluation(recipe, found.summary(), False, None, print)
    assert again.test[1][1]["masks"].sum() == 144
    assert check(wheel) == [] == check(str(wheel), "nuclei")
    with pytest.raises(DataError, match="at most 32"):
        load(InstancesRecipe(data=str(wheel), image_size=48), tmp_path / "crops", print)


def test_mistakes_in_the_wheel_are_named(tmp_path):
    empty = write_nuclei(tmp_path / "empty.whl", np.zeros((128, 128), int))
    assert check(empty) == [f"{empty}: mask2d.tif without a nucleus"]
    other = tmp_path / "other.whl"
    with zipfile.ZipFile(other, "w") as wheel:
        wheel.writestr("code.py", "")
    (tmp_path / "no.whl").write_text("no wheel")
    for path in (other, tmp_path / "no.whl", tmp_path / "missing.whl"):
        (line,) = check(path)
        assert line.startswith(f"{path}, whose img2d.tif cannot be read (")
    with pytest.raises(DataError, match="pip download stardist --no-deps"):
        load(InstancesRecipe(data=str(other)), tmp_path, print)
