"""8-bit files, and the command that writes files of any target."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import polymix
from polymix import errors
from polymix.cli import main
from polymix.export import int8
from polymix.export.manifest import distance, onnx_session
from polymix.workflows.export import read_data

onnx = pytest.importorskip("onnx", reason="untested: exports, for which onnx is needed (the export extra)")
pytest.importorskip("onnxruntime", reason="untested: exports, for which onnxruntime is needed (the export extra)")
DIM = 16


@pytest.fixture(scope="module")
def quantised(tmp_path_factory):
    """PADRe by the command, calibrated on a file."""
    folder = tmp_path_factory.mktemp("int8")
    np.save(folder / "data.npy", np.random.default_rng(0).standard_normal((6, 16, DIM)).astype(np.float32))
    command = ["export", "--mixer", "padre:grid=4x4:kernel_size=3", "--dim", str(DIM), "--tokens", "16", "--target",
               "onnx,int8", "--data", str(folder / "data.npy"), "--out", str(folder / "out")]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 0
    return folder / "out"


@pytest.mark.slow
def test_quantised_files_hold_8_bit_weights_and_are_near(quantised):
    entries = {entry["path"]: entry for entry in json.loads((quantised / "manifest.json").read_text())["files"]}
    reports = json.loads((quantised / "int8/model-report.json").read_text())
    for scheme, limit in (("a8w8", 0.05), ("a16w8", 0.01)):
        path = f"int8/model-{scheme}.onnx"
        assert 1e-4 < entries[path]["error"] < limit, "quantised, and near"
        weights = [part for part in onnx.load(quantised / path).graph.initializer if len(part.dims) >= 2]
        wide = {f"{name}_quantized" for name in reports[scheme].get("in_16_bits", ())}
        assert weights and {part.data_type for part in weights if part.name not in wide} == {onnx.TensorProto.INT8}
        assert {part.data_type for part in weights if part.name in wide} <= {onnx.TensorProto.INT16}
        assert not wide or scheme == "a16w8"
    assert entries["int8/model-a16w8.onnx"]["error"] < entries["int8/model-a8w8.onnx"]["error"]


def test_sums_of_8_bit_products_do_not_overflow_where_the_processor_would_let_them(quantised):
    """On x86 without VNNI the file alone gives another error, and more tensors would be kept in 16 bits."""
    options = onnx_session(quantised / "int8/model-a8w8.onnx").get_session_options()
    assert options.get_session_config_entry("session.x64quantprecision") == "1"


def test_the_report_names_every_product(quantised):
    report = json.loads((quantised / "int8/model-report.json").read_text())["a8w8"]
    tried = {(way["equalised"], way["ranges"]): way["error"] for way in report["tried"]}
    assert report["samples"] == 3 and {ranges for _, ranges in tried} == set(int8.METHODS)
    assert {strength for strength, _ in tried} == {None, 0.5, 1.0}
    assert report["error"] == tried[report["equalised"], report["ranges"]] <= min(tried.values()) / int8.IMPROVEMENT
    assert {layer["operator"] for layer in report["layers"]} <= {"MatMul", "Conv"} and report["layers"]
    assert all(0 < layer["error"] < 0.1 for layer in report["layers"])


def test_a_classifier_reports_the_share_of_same_answers(tmp_path):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    polymix.export.export(model, torch.randn(64, 8), tmp_path / "out", targets=("int8",))
    report = json.loads((tmp_path / "out/int8/model-report.json").read_text())
    assert 0.9 <= report["a8w8"]["same_answer"] <= report["a16w8"]["same_answer"] + 0.05


@pytest.mark.slow
def test_channels_and_classes_of_zeros_keep_scales_and_answers(tmp_path):
    """Pruned channels: a scale of zero or a division by it would put NaN or zero where the numbers stand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 4)).eval()
    with torch.no_grad():
        for rows, layer in ((slice(0, 5), model[0]), (slice(3, 4), model[2])):
            layer.weight[rows], layer.bias[rows] = 0, 0
    x = torch.randn(64, 8)
    polymix.export.export(model, x, tmp_path / "out", targets=("int8",))
    for scheme, limit in (("a8w8", 0.05), ("a16w8", 0.01)):
        graph = onnx.load(tmp_path / f"out/int8/model-{scheme}.onnx").graph
        scales = [onnx.numpy_helper.to_array(part) for part in graph.initializer if part.name.endswith("scale")]
        assert scales and all(np.isfinite(scale).all() and (scale > 0).all() for scale in scales)
        session = onnx_session(tmp_path / f"out/int8/model-{scheme}.onnx")
        (y,) = session.run(None, {session.get_inputs()[0].name: x.numpy()})
        assert distance({"y": y}, {"y": model(x).detach().numpy()}) < limit
        assert np.abs(y[:, 3]).max() < 0.02, "the class that is zero"


def test_a_graph_without_products_is_refused(tmp_path):
    with pytest.raises(errors.CapabilityError, match="without products"):
        polymix.export.export(nn.ReLU().eval(), torch.randn(2, 3), tmp_path / "out", targets=("int8",))
    assert not list(tmp_path.iterdir())


def test_a_runtime_that_is_missing_is_said_not_counted(quantised, monkeypatch, capsys, tmp_path):
    """A machine without OpenVINO can still check the ONNX files of the same folder."""
    import shutil

    from polymix.export import manifest
    from polymix.export.check import main as check_main

    def missing(path, threads):
        raise errors.MissingExtraError("openvino", "openvino")

    out = tmp_path / "out"
    shutil.copytree(quantised, out)
    content = json.loads((out / "manifest.json").read_text())
    content["files"].append({**content["files"][0], "target": "openvino"})
    manifest.write_manifest(out, content)
    monkeypatch.setitem(manifest.RUNTIMES, "openvino", missing)
    assert check_main([str(out)]) == 0
    assert "not run" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arrays", "said"),
    [
        ({"x": np.zeros((1, 16, DIM), np.float32)}, "at least two"),
        ({"x": np.full((4, 16, DIM), np.nan, np.float32)}, "finite values"),
        ({"x": np.zeros((4, 15, DIM), np.float32)}, "samples of shape"),
        ({"y": np.zeros((4, 16, DIM), np.float32)}, "arrays named x"),
    ],
)
def test_bad_calibration_data_is_one_line(arrays, said, tmp_path):
    np.savez(tmp_path / "data.npz", **arrays)
    with pytest.raises(errors.DataError, match=said):
        read_data(tmp_path / "data.npz", {"x": torch.zeros(2, 16, DIM)})


def test_calibration_files_that_are_none(tmp_path):
    (tmp_path / "data.npy").write_bytes(b"none")
    (tmp_path / "folder").mkdir()
    for name in ("data.npy", "missing.npy", "folder"):
        with pytest.raises(errors.DataError):
            read_data(tmp_path / name, {"x": torch.zeros(2, 16, DIM)})


def test_images_calibrate_an_image_model(tmp_path):
    from PIL import Image

    for place in range(3):
        Image.fromarray(np.full((9, 7, 3), 85 * place, np.uint8)).save(tmp_path / f"{place}.png")
    (batch,) = read_data(tmp_path, {"pixels": torch.zeros(2, 3, 8, 8)})
    assert batch["pixels"].shape == (2, 3, 8, 8) and batch["pixels"].min() == -1


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "--model"),
        (["--mixer", "pom", "--model", "x"], "one of the two"),
        (["--mixer", "pom", "--tokens", "4"], "--dim"),
        (["--mixer", "pom", "--dim", "4"], "--tokens"),
        (["--mixer", "pom", "--dim", "4", "--tokens", "4", "--weights", "w.pt"], "--weights"),
        (["--mixer", "pom", "--dim", "4", "--tokens", "4", "--target", "toaster"], "toaster"),
        (["--mixer", "pom", "--dim", "4", "--tokens", "4", "--modes", "sideways"], "sideways"),
        (["--model", "timm/deit_tiny_patch16_224", "--dim", "4"], "--dim"),
    ],
)
def test_mistakes_in_the_command_are_one_line(words, said, tmp_path, capsys):
    with pytest.raises(SystemExit) as end:
        main(["export", *words, "--out", str(tmp_path / "out")])
    printed = capsys.readouterr().err.strip()
    assert end.value.code == 2 and said in printed and "\n" not in printed
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_a_run_of_polymix_train_exports_with_its_own_data(tmp_path):
    """The input is what the evaluation gives the model: nobody has to know its shape."""
    from polymix.domains.classify.recipe import ClassifyRecipe
    from polymix.train.run import train

    train(ClassifyRecipe.tiny().changed(steps=2), tmp_path / "run")
    with pytest.raises(SystemExit) as end:
        main(["export", "--model", str(tmp_path / "run"), "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    entry = json.loads((tmp_path / "out/manifest.json").read_text())["files"][0]
    assert entry["free"] == ["batch"]
    arrays = np.load(tmp_path / "out" / entry["inputs"])
    assert arrays["images"].ndim == 4 and len(arrays["images"]) == 2


def test_distance_is_relative_and_infinite_for_nan():
    expected = {"y": np.array([3.0, 4.0])}
    assert distance({"y": np.array([3.0, 4.5])}, expected) == pytest.approx(0.1)
    assert distance({"y": np.array([np.nan, 4.0])}, expected) == distance({}, expected) == np.inf
