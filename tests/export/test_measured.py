"""Exported files in the place of their models: what they reach on held-out data, and what they are calibrated with."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

import polymix
from polymix.cli import main
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.errors import CapabilityError, DataError, OptionError
from polymix.export.substitute import substitute
from polymix.train.run import train
from polymix.train.saved import SavedRun
from polymix.workflows import exported_runs
from polymix.workflows.evaluate import Settings, evaluate

pytest.importorskip("onnxruntime", reason="untested: exports, for which onnxruntime is needed (the export extra)")
TINY = {"steps": 60, "evaluate_every": 60, "dim": 16, "depth": 1, "image_size": 8, "batch_size": 32, "control": False}


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """A digits transformer, and its export to onnx and int8 by the command."""
    root = tmp_path_factory.mktemp("measured")
    train(ClassifyRecipe(**TINY), root / "run")
    with pytest.raises(SystemExit) as end:
        main(["export", "--model", str(root / "run"), "--target", "onnx,int8", "--out", str(root / "out")])
    assert end.value.code == 0
    return root


@pytest.mark.slow
def test_the_manifest_says_what_quantised_files_reach(exported, capsys):
    rows = json.loads((exported / "out/manifest.json").read_text())["measured"]
    assert [row["path"] for row in rows] == [None, "int8/model-a8w8.onnx", "int8/model-a16w8.onnx"]
    plain = evaluate(Settings(exported / "run")).metrics
    assert rows[0]["metrics"] == plain and rows[0]["count"] == evaluate(Settings(exported / "run")).count > 300
    for row in rows[1:]:
        again = evaluate(Settings(exported / "run", exported=exported / "out" / row["path"])).metrics
        assert again == row["metrics"]
        assert again["loss"] != plain["loss"], "the file itself is measured"
        assert abs(again["accuracy"] - plain["accuracy"]) < 0.03
    assert polymix.export.check(exported / "out"), "the manifest still has its files"


@pytest.mark.slow
def test_evaluate_measures_an_exported_file_by_the_command(exported, capsys):
    command = ["evaluate", str(exported / "run"), "--exported", str(exported / "out/onnx/model.onnx"), "--json"]
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 0
    content = json.loads(capsys.readouterr().out)["metrics"]
    assert content["loss"] == pytest.approx(evaluate(Settings(exported / "run")).metrics["loss"], rel=1e-4)


@pytest.mark.slow
def test_ranges_come_from_training_data(exported):
    run = SavedRun.of(exported / "run")
    graph = exported_runs.trained_graph(run)
    batches = graph.calibration()
    assert sum(len(batch["images"] if "images" in batch else next(iter(batch.values()))) for batch in batches) == 128
    ((name, example),) = graph.inputs.items()
    pixels = np.concatenate([batch[name] for batch in batches])
    assert pixels.shape[1:] == tuple(example.shape[1:])
    data = run.task.load(Path())
    mean, std = run.summary["mean"][0], run.summary["std"][0]
    known = torch.stack([(data.train[place][0] - mean) / std for place in range(len(data.train))]).flatten(1)
    apart = torch.cdist(torch.from_numpy(pixels).flatten(1), known).min(1).values
    assert float(apart.max()) < 0.02, "each is an image of the training data, normalised"


def grey_images(folder, lightest):
    from PIL import Image

    draw = np.random.default_rng(0)
    for split in ("train", "val"):
        for label in ("a", "b"):
            (folder / split / label).mkdir(parents=True)
            for place in range(8):
                pixels = draw.integers(0, lightest + 1, (8, 8), np.uint8)
                Image.fromarray(pixels).save(folder / split / label / f"{place}.png")
    return str(folder)


@pytest.mark.slow
def test_data_with_classes_take_the_place_of_the_trainings_own(tmp_path):
    """Images far darker than the training's: their ranges differ, and the figures are of them alone."""
    light, dark = grey_images(tmp_path / "light", 255), grey_images(tmp_path / "dark", 20)
    train(ClassifyRecipe(**{**TINY, "steps": 2, "evaluate_every": 2}, data=light), tmp_path / "run")
    command = ["export", "--model", str(tmp_path / "run"), "--data", dark, "--target", "int8"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    rows = json.loads((tmp_path / "out/manifest.json").read_text())["measured"]
    assert rows[0]["metrics"] == evaluate(Settings(tmp_path / "run", data=dark)).metrics
    assert rows[0]["metrics"] != evaluate(Settings(tmp_path / "run")).metrics
    run = SavedRun.of(tmp_path / "run")
    given, own = (exported_runs.trained_graph(run, data) for data in (dark, None))
    (name,) = given.inputs
    largest = [max(float(batch[name].max()) for batch in graph.calibration()) for graph in (given, own)]
    assert largest[0] < largest[1] - 1
    assert given.calibration() is given.calibration(), "once for all targets"


@pytest.mark.slow
def test_data_need_a_target_that_calibrates(exported, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(
            [
                "export",
                "--model",
                str(exported / "run"),
                "--data",
                "digits",
                "--target",
                "onnx",
                "--out",
                str(tmp_path / "out"),
            ]
        )
    assert end.value.code == 2
    assert "--data" in capsys.readouterr().err and not (tmp_path / "out").exists()


@pytest.mark.slow
def test_another_task_has_its_own_metrics(tmp_path):
    """Lines of handwriting: error rates of decoded text instead of accuracy."""
    train(HandwritingRecipe.tiny().changed(control=False), tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        main(["export", "--model", str(tmp_path / "run"), "--target", "int8", "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    rows = json.loads((tmp_path / "out/manifest.json").read_text())["measured"]
    assert len(rows) == 3 and all("cer" in row["metrics"] for row in rows)


@pytest.mark.slow
def test_any_classifier_of_images_is_calibrated_on_the_digits(tmp_path):
    (tmp_path / "host.py").write_text(
        "import polymix\nfrom polymix.models import VisionTransformer\n\ndef build():\n"
        "    return VisionTransformer(polymix.PomConfig(), image_size=8, patch_size=2, dim=16, depth=1, classes=10,"
        " channels=1)\n"
    )
    with pytest.raises(SystemExit) as end:
        main(["export", "--model", f"{tmp_path / 'host.py'}:build", "--target", "int8", "--data", "digits",
              "--image-size", "8", "--out", str(tmp_path / "out")])  # fmt: skip
    assert end.value.code == 0
    report = json.loads((tmp_path / "out/int8/model-report.json").read_text())
    assert report["a8w8"]["samples"] == 64, "pairs of 128 digits"


def test_outputs_keep_their_structure_and_batches_their_size(tmp_path):
    class Two(nn.Module):
        def __init__(self, named):
            super().__init__()
            self.map, self.named = nn.Linear(4, 4), named

        def forward(self, x):
            y = self.map(x)
            return {"low": y - 1, "high": y + 1} if self.named else (y, 2 * y)

    for named in (False, True):
        model, out = Two(named).eval(), tmp_path / str(named)
        polymix.export.export(model, torch.randn(2, 4), out)
        x = torch.randn(5, 4)
        with torch.no_grad():
            want, got = model(x), substitute(model, out / "onnx/model.onnx")(x)
        assert type(got) is type(want)
        pairs = zip(got.values(), want.values(), strict=True) if named else zip(got, want, strict=True)
        for left, right in pairs:
            torch.testing.assert_close(left, right)
        with pytest.raises(CapabilityError, match="a call with x, other"):
            model(x, other=x)


@pytest.mark.slow
def test_mistakes_are_told_before_anything_is_measured(exported, tmp_path):
    with pytest.raises(DataError, match=r"none\.onnx, which does not exist"):
        Settings(exported / "run", exported=tmp_path / "none.onnx")
    with pytest.raises(OptionError):
        evaluate(Settings(exported / "run", tokens=5, exported=exported / "out/onnx/model.onnx"))
