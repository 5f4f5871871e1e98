"""Days of the year of satellite series, series as TSViT's authors prepare them, and what counts as a class in mIoU."""

import csv
import json
import pickle
import shutil
from dataclasses import replace

import numpy
import pytest
import torch

from polymix.domains.satellite.data import Windows, check, legacy_days, load
from polymix.domains.satellite.pastis import days_of, read_patches
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.domains.satellite.synthetic import synthetic
from polymix.train.data.label_maps import Confusion
from polymix.train.data.problems import Problems


@pytest.fixture(scope="module")
def pastis(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("pastis"), 0, 6, 2, 28)


def test_days_are_counted_from_one_in_both_layouts_and_padding_is_none_of_them(pastis, tmp_path):
    """Padding once shared a row with 1 January, and a model of one layout was a day off on the other."""
    assert days_of({"0": 20190101, "1": 20191231}) == [1, 365] and days_of({"0": 20200101, "1": 20201231}) == [1, 365]
    padded = load(SatelliteRecipe(data=str(pastis), classes=6, mask_padding=False), pastis, print)
    _, days, present, _, _ = padded.collate([padded.train[0]])
    assert days[present].min() >= 1 and not days[~present].any()
    for name, doy in (("train", [1, 365, 366]), ("val", [1, 2, 3]), ("test", [0, 1, 2])):
        content = {"img": numpy.zeros((3, 10, 24, 24), numpy.float32), "labels": numpy.zeros((24, 24), numpy.int64),
                   "doy": numpy.array(doy)}  # fmt: skip
        with open(tmp_path / f"{name}.pickle", "wb") as file:
            pickle.dump(content, file)
        with open(tmp_path / f"{name}_paths.csv", "w", newline="") as file:
            csv.writer(file).writerow([f"{name}.pickle"])
    problems = check(tmp_path, allow_pickle=True)
    assert len(problems) == 2 and "test.pickle" in problems[0] and "no day of the year" in problems[0]
    patches = read_patches(tmp_path, None, Problems(), allow_pickle=True)
    assert patches[0].days.tolist() == [1, 365, 365]


def test_series_as_the_authors_prepare_them(pastis, tmp_path):
    """By day of the year over two years, the first of them, days read back from float32, statistics of fold 1."""
    folder = tmp_path / "fields"
    shutil.copytree(pastis, folder)
    dates = [20180915 + place for place in range(12)] + [20190901 + place for place in range(12)]
    metadata = json.loads((folder / "metadata.geojson").read_text())
    metadata["features"][0]["properties"]["dates-S2"] = {str(place): date for place, date in enumerate(dates)}
    (folder / "metadata.geojson").write_text(json.dumps(metadata))
    recipe = SatelliteRecipe(data=str(folder), classes=6, dates=20, fold=2)
    plain, legacy = (load(recipe.changed(legacy_series=one), folder, print) for one in (False, True))
    norms = json.loads((folder / "NORM_S2_patch.json").read_text())
    assert legacy.mean.tolist() == pytest.approx(norms["Fold_1"]["mean"]) and not torch.equal(legacy.mean, plain.mean)
    (first,) = [k for k, patch in enumerate(legacy.test.patches) if patch.name.endswith("S2_10000.npy")]
    data = replace(legacy, train=Windows(legacy.test.patches[first : first + 1], *options_of_windows(legacy)))
    values, days, _, _ = data.train[0]
    assert days.tolist() == legacy_days(torch.tensor([*range(244, 256), *range(258, 266)])).tolist()
    raw = (values * legacy.std[:, None, None] + legacy.mean[:, None, None]).round()
    series = numpy.load(folder / "DATA_S2" / "S2_10000.npy")[[*range(12, 24), *range(8)], :, :24, :24]
    assert torch.allclose(raw, torch.from_numpy(series).float(), atol=0.5)
    early = torch.arange(366) - legacy_days(torch.arange(366))
    assert early.sum() == (early == 1).sum() == 18 and legacy_days(torch.tensor([0, 365])).tolist() == [0, 365]


def options_of_windows(data):
    return data.test.size, data.test.dates, data.mean, data.std, data.test.legacy


def test_a_class_that_is_predicted_and_never_true_counts_as_zero():
    """As the authors of TSViT and of SegFormer count: it was once left out, which raised mIoU on small test sets."""
    confusion = Confusion(4)
    confusion.update(torch.tensor([0, 1, 2, 2]), torch.tensor([0, 1, 1, 0]))
    assert confusion.per_class() == [0.5, 0.5, 0.0, None]
    assert confusion.compute() == {"miou": pytest.approx(1 / 3), "accuracy": 0.5}
    assert confusion.named("abcd")["iou_c"] == 0.0 and "iou_d" not in confusion.named("abcd")
    assert Confusion(2).compute() == {"miou": 0.0, "accuracy": 0.0}
