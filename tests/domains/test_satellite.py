"""Satellite time series: PASTIS as it lies on disk, its mistakes, windows, the metric, and runs by the command line."""

import csv
import json
import pickle

import numpy
import pytest
import torch

from polymix.cli import main
from polymix.domains.satellite.data import check, load
from polymix.domains.satellite.recipe import SatelliteRecipe
from polymix.domains.satellite.synthetic import LAND_COVERS, make_patch, synthetic
from polymix.domains.satellite.task import SatelliteTask
from polymix.errors import DataError, OptionError, PolymixError, ShapeError
from polymix.train.data.label_maps import Confusion, windows
from polymix.train.data.sampling import number
from polymix.train.registry import options_of
from polymix.train.rows import TrainRow, check_rows, floor_sentence
from polymix.train.run import check_data, train

TINY = SatelliteRecipe.tiny()


@pytest.fixture(scope="module")
def pastis(tmp_path_factory):
    return synthetic(tmp_path_factory.mktemp("pastis"), 0, 6, 2, 28)


@pytest.fixture
def broken(pastis, tmp_path):
    """A copy to break: the folder, and a function that changes the properties of the first patch."""
    import shutil

    folder = tmp_path / "broken"
    shutil.copytree(pastis, folder)

    def change(**properties):
        path = folder / "metadata.geojson"
        content = json.loads(path.read_text())
        content["features"][0]["properties"].update(properties)
        path.write_text(json.dumps(content))

    return folder, change


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    out = tmp_path_factory.mktemp("satellite") / "out"
    train(TINY, out)
    return out


def changed(*words):
    return TINY.changed(**options_of(words, {}))


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


# Readers


def test_synthetic_fields_are_read_back_as_they_were_written(pastis):
    series, labels, _, days = make_patch(number(0, 0), 28)
    data = load(SatelliteRecipe(data=str(pastis), classes=6), pastis, print)
    values, dates, truth, place = data.train[0]
    raw = values * data.std[:, None, None] + data.mean[:, None, None]
    assert torch.equal(dates, days + 1) and torch.equal(truth, labels[:24, :24]) and place == (0, 0, 0)
    assert torch.allclose(raw, series[:, :, :24, :24].round(), atol=0.5)
    assert numpy.load(pastis / "DATA_S2" / "S2_10000.npy").dtype == numpy.int16


def test_windows_cover_every_pixel_where_24_does_not_divide(pastis):
    assert windows(128, 24) == [0, 24, 48, 72, 96, 104] and windows(24, 24) == [0] and windows(48, 24) == [0, 24]
    data = load(SatelliteRecipe(data=str(pastis), classes=6), pastis, print)
    seen = torch.zeros(28, 28)
    for which, top, left in data.train.places:
        if which == 0:
            seen[top : top + 24, left : left + 24] += 1
    assert seen.min() == 1 and len(data.train) == 6 * 4


def test_statistics_are_those_of_the_training_folds(pastis, broken):
    norms = json.loads((pastis / "NORM_S2_patch.json").read_text())
    data = load(SatelliteRecipe(data=str(pastis), classes=6), pastis, print)
    assert data.mean.tolist() == pytest.approx([sum(norms[f"Fold_{k}"]["mean"][b] for k in (1, 2, 3)) / 3
                                                for b in range(10)], rel=1e-5)  # fmt: skip
    folder, _ = broken
    (folder / "NORM_S2_patch.json").unlink()
    measured = load(SatelliteRecipe(data=str(folder), classes=6), folder, print)
    assert torch.allclose(measured.mean, data.mean, rtol=1e-2)


def test_long_series_are_thinned_and_short_ones_padded(pastis):
    data = load(SatelliteRecipe(data=str(pastis), classes=6, dates=10), pastis, print)
    assert data.train[0][0].shape == (10, 10, 24, 24)
    padded = load(SatelliteRecipe(data=str(pastis), classes=6, mask_padding=False), pastis, print)
    series, _, present, _, _ = padded.collate([padded.train[0]])
    assert series.shape[1] == 60 and present.sum() == 24 and not series[:, 24:].any()


@pytest.mark.parametrize(("properties", "named"), [
    ({"dates-S2": {"0": "20190101"}}, "'20190101' instead of a number"),
    ({"dates-S2": {"0": 20190301, "1": 20190201}}, "not in order: 20190201 follows 20190301"),
    ({"dates-S2": {"0": 20191345}}, "no date"), ({"dates-S2": {}}, "missing"), ({"Fold": 9}, "Fold is 9"),
    ({"dates-S2": {"0": 20190101}}, "24 images for 1 dates"), ({"ID_PATCH": 77}, "does not exist"),
    ({"ID_PATCH": 10001}, "twice"), ({"dates-S2": '{"0": 20190101}'}, "is text instead of"),
    ({"dates-S2": [20190101]}, "is a list instead of"), ({"dates-S2": {"²": 20190101}}, "key '²' instead of a number"),
])  # fmt: skip
def test_mistakes_of_the_metadata_are_one_line_and_listed(broken, properties, named):
    folder, change = broken
    change(**properties)
    with pytest.raises(DataError, match=named) as told:
        load(SatelliteRecipe(data=str(folder), classes=6), folder, print)
    assert "metadata.geojson: patch" in str(told.value) and len(str(told.value).splitlines()) == 1
    assert any(named in problem for problem in check(folder))


@pytest.mark.parametrize(("shape", "value", "named"), [
    ((24, 9, 28, 28), 0, "10 bands"), ((24, 10, 28, 20), 0, "28 × 20"), ((24, 10, 28, 28), numpy.nan, "date 0, band 0, row 0, column 0, from 0: the first pixel that is not finite"),
])  # fmt: skip
def test_mistakes_of_a_cube(broken, shape, value, named):
    folder, _ = broken
    numpy.save(folder / "DATA_S2" / "S2_10000.npy", numpy.full(shape, value, dtype=numpy.float32))
    with pytest.raises(DataError, match=named):
        load(SatelliteRecipe(data=str(folder), classes=6), folder, print)
    assert any(named in problem for problem in check(folder))


def test_other_mistakes(broken, tmp_path):
    folder, _ = broken
    target = folder / "ANNOTATIONS" / "TARGET_10001.npy"
    numpy.save(target, numpy.full((3, 28, 28), 18, dtype=numpy.uint8))
    with pytest.raises(DataError, match="have 18: no class from 0 to 5"):
        load(SatelliteRecipe(data=str(folder), classes=6), folder, print)
    (folder / "DATA_S2" / "S2_10002.npy").write_bytes(b"nothing")
    assert sum("S2_10002.npy" in problem for problem in check(folder)) == 1, check(folder)
    with pytest.raises(DataError, match="which has neither"):
        load(SatelliteRecipe(data=str(tmp_path)), tmp_path, print)


def test_a_fold_without_patches_and_a_window_that_does_not_fit(broken):
    folder, _ = broken
    assert not check(folder)
    path = folder / "metadata.geojson"
    content = json.loads(path.read_text())
    content["features"] = [row for row in content["features"] if row["properties"]["Fold"] != 5]
    path.write_text(json.dumps(content))
    with pytest.raises(DataError, match=f"{folder} without patches in fold 5"):
        load(SatelliteRecipe(data=str(folder), classes=6), folder, print)
    assert check(folder) == [f"{path}: fold 5 has no patches"]
    assert load(SatelliteRecipe(data=str(folder), classes=6, fold=2), folder, print).counts["test_patches"] == 2
    with pytest.raises(DataError, match="window"):
        load(SatelliteRecipe(data=str(folder), classes=6, fold=2, window=48), folder, print)


def test_check_lists_every_mistake_by_file_and_entry(broken):
    """Each is also the one line with which training refuses the data."""
    folder, _ = broken
    path, cubes, targets = folder / "metadata.geojson", folder / "DATA_S2", folder / "ANNOTATIONS"
    content = json.loads(path.read_text())
    about = [row["properties"] for row in content["features"]]
    assert [row["Fold"] for row in about] == [1, 2, 3, 1, 2, 3, 4, 4, 5, 5]
    series = numpy.load(cubes / "S2_10000.npy")
    numpy.save(cubes / "S2_10000.npy", series[:, :9])
    about[1]["dates-S2"]["3"] = 20180101
    about[2]["dates-S2"]["0"] = "2019-01-01"
    holes = series.astype(numpy.float32)
    holes[5, 2, 7, 7] = numpy.nan
    numpy.save(cubes / "S2_10003.npy", holes)
    numpy.save(targets / "TARGET_10004.npy", numpy.zeros((3, 28, 20), numpy.uint8))
    numpy.save(targets / "TARGET_10005.npy", numpy.full((3, 28, 28), 44, numpy.uint8))
    content["features"][6]["properties"] = None
    content["features"] = content["features"][:8]
    path.write_text(json.dumps(content))
    expected = (
        (path, "patch 10000", "S2_10000.npy", "(24, 9, 28, 28)", "10 bands"), (path, "patch 10001", "20180101 follows"),
        (path, "patch 10002", "'2019-01-01' instead of a number such as 20180915"),
        (cubes / "S2_10003.npy", "not finite", "date 5, band 2, row 7, column 7"), (path, "patch 10004", "TARGET_10004.npy", "(3, 28, 20)", "28 × 28"),
        (targets / "TARGET_10005.npy", "have 44"), (path, "feature 6", "Fold is None"), (path, "fold 2 has no patches"),
        (path, "fold 5 has no patches"),
    )  # fmt: skip
    problems = check(folder)
    for parts in expected:
        assert sum(all(str(part) in problem for part in parts) for problem in problems) == 1, (parts, problems)
    assert all(len(problem.splitlines()) == 1 for problem in problems)
    assert len(problems) == len(expected)


class Attack:
    def __reduce__(self):
        return print, ("run by a pickle",)


def test_pickles_are_read_only_when_asked_and_run_nothing(tmp_path, capsys):
    for name in ("train", "val", "test"):
        content = {"img": numpy.zeros((3, 10, 24, 24), numpy.float32), "labels": numpy.zeros((24, 24), numpy.int64),
                   "doy": numpy.array([10, 20, 30])}  # fmt: skip
        with open(tmp_path / f"{name}.pickle", "wb") as file:
            pickle.dump(content, file)
        with open(tmp_path / f"{name}_paths.csv", "w", newline="") as file:
            csv.writer(file).writerow([f"{name}.pickle"])
    with pytest.raises(OptionError, match="allow_pickle=True"):
        load(SatelliteRecipe(data=str(tmp_path)), tmp_path, print)
    with pytest.raises(OptionError, match="allow_pickle=True"):
        check_data(SatelliteRecipe(data=str(tmp_path)))
    asked = SatelliteRecipe(data=str(tmp_path), allow_pickle=True)
    assert check_data(asked) == []
    data = load(asked, tmp_path, print)
    assert len(data.train) == len(data.test) == 1 and data.train[0][1].tolist() == [10, 20, 30]
    with open(tmp_path / "train.pickle", "wb") as file:
        pickle.dump({"img": Attack()}, file)
    with pytest.raises(DataError, match="not an array"):
        load(asked, tmp_path, print)
    assert "run by a pickle" not in capsys.readouterr().out


# The metric


def test_the_confusion_matrix_counts_what_is_not_ignored():
    confusion = Confusion(3, ignore=19)
    confusion.update(torch.tensor([0, 1, 1, 0]), torch.tensor([0, 1, 0, 19]))
    assert confusion.compute() == {"miou": pytest.approx((1 / 2 + 1 / 2) / 2), "accuracy": pytest.approx(2 / 3)}
    assert confusion.per_class() == [0.5, 0.5, None]
    with pytest.raises(ShapeError, match="classes from 0 to 2"):
        confusion.update(torch.tensor([0]), torch.tensor([7]))


# Runs


@pytest.mark.slow
def test_a_run_has_rows_a_control_pictures_and_a_report(run_folder):
    content = json.loads((run_folder / "results.json").read_text())
    rows = check_rows(content, "results.json")
    assert [row["mixer"] for row in rows] == ["pom:degree=3:expand=4", "linear_floor"] and set(
        rows[0]
    ) == TrainRow.__required_keys__
    assert list(rows[0]["metrics"]) == ["miou", "accuracy"] and rows[0]["directions"]["miou"] == "up"
    assert rows[0]["paper"] is None, "the paper's figures are of PASTIS, and of another TSViT"
    assert rows[0]["inference_per_second"] > 0 and rows[0]["peak_bytes"] > 0 and rows[0]["unit"] == "km2"
    assert content["control"].startswith("linear_floor, which mixes nothing") and content["finished"]
    page = (run_folder / "report.html").read_text()
    assert content["control"] in page and "miou ↑" in page
    assert (run_folder / "predictions.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.draws
def test_evaluate_and_predict(run_folder, pastis, tmp_path, capsys):
    status, said, _ = command(capsys, "evaluate", run_folder, "--data", pastis, "--json")
    content = json.loads(said)
    assert (
        status == 0 and content["unit"] == "patches" and content["count"] == 2 and 0 <= content["metrics"]["miou"] <= 1
    )
    file = pastis / "DATA_S2" / "S2_10003.npy"
    status, _, _ = command(capsys, "predict", run_folder, file, "--out", tmp_path / "seen")
    row = json.loads((tmp_path / "seen" / "predictions.json").read_text())["results"][0]
    classes = numpy.load(tmp_path / "seen" / row["map"])
    assert status == 0 and row["file"] == str(file) and classes.shape == (28, 28) and classes.max() < len(LAND_COVERS)
    assert sum(row["shares"].values()) == pytest.approx(1, abs=1e-3)
    assert (tmp_path / "seen" / row["picture"]).read_bytes().startswith(b"\x89PNG")
    status, _, error = command(capsys, "predict", run_folder, tmp_path / "none.npy", "--out", tmp_path / "other")
    assert status == 2 and "a file or folder" in error and "none.npy" in error


def test_check_lists_all_problems_and_trains_nothing(broken, capsys, tmp_path):
    folder, change = broken
    status, said, _ = command(capsys, "train", "satellite", "--data", folder, "--check")
    assert status == 0 and "0 problems" in said
    change(Fold=0)
    (folder / "ANNOTATIONS" / "TARGET_10001.npy").unlink()
    status, said, _ = command(capsys, "train", "satellite", "--data", folder, "--check", "--out", tmp_path / "out")
    assert status == 1 and "2 problems" in said and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_init_starts_from_a_run_and_names_what_does_not_fit(run_folder, tmp_path):
    start = changed(f"init={run_folder}", "control=False", "steps=1", "learning_rate=1e-9")
    train(start, tmp_path / "out")
    before, after = (torch.load(folder / "model.pt", weights_only=True) for folder in (run_folder, tmp_path / "out"))
    assert all(torch.allclose(after[name], value, atol=1e-6) for name, value in before.items())
    with pytest.raises(PolymixError, match="init"):
        train(start.changed(dim=16), tmp_path / "other")


@pytest.mark.parametrize(("words", "named"), [
    (["layout=pastis"], "layout"), (["patch=5"], r"divisor of the window, got 5 with window=24.*patch=4"), (["plan=9:x"], "got '9'"), (["mixer=nope"], "nope"), (["fold=6"], "fold"),
])  # fmt: skip
def test_wrong_options_are_told_before_anything_is_written(words, named, tmp_path):
    with pytest.raises(PolymixError, match=named):
        train(changed(*words), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_a_mixer_without_a_mask_is_refused_before_training_on_series_of_different_lengths(broken):
    """poly_sa used to fail in the first batch with padded dates."""
    folder, change = broken
    series = numpy.load(folder / "DATA_S2" / "S2_10000.npy")
    numpy.save(folder / "DATA_S2" / "S2_10000.npy", series[:20])
    dates = json.loads((folder / "metadata.geojson").read_text())["features"][0]["properties"]["dates-S2"]
    change(**{"dates-S2": dict(list(dates.items())[:20])})
    words = [f"data={folder}", "mixer=poly_sa", "classes=6"]
    with pytest.raises(OptionError, match="poly_sa, which takes no mask, for series of different lengths"):
        train(changed(*words), folder / "out")
    assert not (folder / "out" / "metrics.jsonl").exists()
    for more in ({"dates": 20}, {"mask_padding": False}, {"mixer": "pom"}, {"mixer": "linear_floor"}):
        task = SatelliteTask(changed(*words).changed(**more))
        assert task.build(task.load(folder))


def test_a_plan_mixes_blocks():
    recipe = TINY.changed(plan="1:1")
    model = SatelliteTask(recipe).build(type("Data", (), {"classes": LAND_COVERS, "padded": False}))
    names = [block.mixer.name for block in (*model.temporal, *model.spatial)]
    assert names == ["pom", "softmax"] and recipe.mixer_name == "pom:degree=3:expand=4 (1:1)"


def test_the_paper_s_preset_has_its_numbers():
    paper = SatelliteRecipe.paper()
    assert (paper.dim, paper.temporal_depth, paper.spatial_depth, paper.patch, paper.window) == (128, 4, 4, 2, 24)
    assert (paper.learning_rate, paper.weight_decay, paper.batch_size, paper.warmup) == (1e-3, 0.0, 16, 0.1)
    assert paper.final * paper.learning_rate == pytest.approx(5e-6) and not paper.mask_padding
    assert paper.days == "random", "as published"
    assert paper.epochs == 100 and paper.changed(steps=4).epochs is None


def test_the_paper_s_epochs_are_counted_by_the_reader_s_windows(tmp_path):
    """The preset once counted 25 windows a patch, as a cut into 24 × 24 without the rest has, and trained 69 epochs."""
    folder = synthetic(tmp_path, 0, 3, 1, 28)
    for place in range(10000, 10005):
        numpy.save(folder / "DATA_S2" / f"S2_{place}.npy", numpy.zeros((24, 10, 128, 128), numpy.int16))
        numpy.save(folder / "ANNOTATIONS" / f"TARGET_{place}.npy", numpy.zeros((3, 128, 128), numpy.uint8))
    paper = SatelliteRecipe.paper()
    data = load(paper.changed(data=folder), tmp_path, print)
    per_patch = len(data.train) / len(data.train.patches)
    found = paper.for_data(SatelliteTask(paper).epoch(data, 1))
    assert per_patch == 36 and found.steps == 100 * 3 * 36 / 16
    assert paper.evaluate_every == paper.checkpoint_every == 2000, "as published"


def test_the_sentence_about_the_floor_says_when_it_is_not_lower():
    def row(mixer, value, way="up"):
        return {"mixer": mixer, "metrics": {"m": value}, "directions": {"m": way}, "units": {"m": ""}}

    assert "mixing added nothing" in floor_sentence([row("pom", 0.5), row("linear_floor", 0.5)])
    assert "mixing added nothing" not in floor_sentence([row("pom", 0.6), row("linear_floor", 0.5)])
    assert "mixing added nothing" in floor_sentence([row("pom", 0.6, "down"), row("linear_floor", 0.5, "down")])
    assert floor_sentence([row("pom", 0.6)]) is None


@pytest.mark.slow
def test_compare_trains_mixers_and_the_floor_and_resumes(tmp_path, capsys):
    options = ["--preset", "tiny", "--set", "steps=1", "--mixers", "pom,poly_sa", "--seeds", "1"]
    status, said, _ = command(capsys, "compare", "--task", "satellite", *options, "--out", tmp_path / "out")
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    mixers = [row["mixer"] for row in check_rows(content, "results.json")]
    assert status == 0 and mixers[:2] == ["softmax", "pom"] and mixers[-1] == "linear_floor"
    assert content["control"] in " ".join(said.split()) and content["finished"]
    assert content["pictures"]["pom"] == "pom-0.png" and (tmp_path / "out" / "pom-0.png").is_file()
    assert {*mixers, *(row["mixer"] for row in content["refused"])} == {"softmax", "pom", "poly_sa", "linear_floor"}
    content["rows"].pop()
    (tmp_path / "out" / "results.json").write_text(json.dumps({**content, "finished": False}))
    status, _, _ = command(capsys, "compare", "--task", "satellite", *options, "--out", tmp_path / "out", "--resume")
    again = json.loads((tmp_path / "out" / "results.json").read_text())
    assert status == 0 and [row["mixer"] for row in again["rows"]] == mixers
    status, _, error = command(
        capsys, "compare", "--task", "satellite", "--image-size", "8", "--out", tmp_path / "other"
    )
    assert status == 2 and "--image-size" in error, "an option that the domain lacks is not ignored"


def test_the_paper_s_figures_stand_beside_pastis_in_its_tsvit_alone(pastis, monkeypatch):
    """They once stood beside synthetic fields, and beside a TSViT of 8 channels."""
    paper = SatelliteRecipe.paper().changed(data=pastis)
    assert SatelliteTask(paper).published() is None, "other data in its layout"
    monkeypatch.setattr("polymix.domains.satellite.metrics.PATCHES", 10)
    assert SatelliteTask(paper).published()["miou"] == 0.646
    assert SatelliteTask(paper.changed(mixer="softmax")).published()["accuracy"] == 0.828
    for other in (
        {"data": None},
        {"fold": 2},
        {"dim": 64},
        {"plan": "1:1"},
        {"mixer": "qt"},
        {"mixer": "pom:degree=3"},
    ):
        assert SatelliteTask(paper.changed(**other)).published() is None


def test_another_seed_has_other_fields(tmp_path):
    """Fields of seed 0 were once taken for those of seed 1 and back."""
    series = {}
    for place, seed in enumerate((0, 1, 0)):
        data = load(TINY.changed(seed=seed), tmp_path, print)
        series[place] = data.train[0][0] * data.std[:, None, None]
    assert torch.equal(series[0], series[2]) and not torch.equal(series[0], series[1])


@pytest.mark.slow
def test_the_weights_of_the_best_evaluation_are_kept_and_measured_once(tmp_path, monkeypatch):
    """Chosen by the mIoU of the fourth fold; the fifth is measured with those weights, and so after an interruption."""
    asked = []
    real = SatelliteTask.measure

    def measure(task, model, data, process):
        asked.append({patch.fold for patch in data.test.patches})
        numbers = real(task, model, data, process)
        if len(asked) == stop:
            raise KeyboardInterrupt
        return numbers if asked[-1] == {5} else {"miou": scores[len(asked) - 1], "accuracy": 0.5}

    monkeypatch.setattr(SatelliteTask, "measure", measure)
    words = ("keep=best", "steps=4", "checkpoint_every=1", "control=False")
    scores, stop = [0.1, 0.4, 0.3, 0.2], None
    train(changed(*words, "evaluate_every=1"), tmp_path / "out")
    assert asked == [{4}] * 4 + [{5}]
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    last, (row,) = content["evaluations"][-1], content["rows"]
    assert last["kept_step"] == 2 and list(row["metrics"]) == [
        "miou",
        "accuracy",
        "validation_miou",
        "validation_accuracy",
    ]
    assert set(row["directions"].values()) == {"up"} and row["metrics"]["validation_miou"] == 0.2
    asked.clear()
    stop = 4
    with pytest.raises(KeyboardInterrupt):
        train(changed(*words, "evaluate_every=1"), tmp_path / "again")
    scores, stop = [0.2], None
    asked.clear()
    train(changed(*words, "evaluate_every=1"), tmp_path / "again", resume=True)
    assert asked == [{4}, {5}]
    asked.clear()
    scores = [0.4, 0.2]
    train(changed(*words, "evaluate_every=2"), tmp_path / "two")
    first, *others = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("out", "again", "two"))
    assert all(torch.equal(value, other[name]) for other in others for name, value in first.items()), "those of step 2"
    from polymix.domains.jigsaw.recipe import JigsawRecipe

    with pytest.raises(OptionError, match="jigsaw has no validation part"):
        train(JigsawRecipe.tiny().changed(keep="best"), tmp_path / "jigsaw")
