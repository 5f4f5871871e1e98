"""Some tensors in 16 bits, until a quantised file is exact enough."""

import json

import pytest
import torch

import polymix
from polymix import errors
from polymix.cli import main
from polymix.export import wide
from tests.helpers import slow_but

onnx = pytest.importorskip("onnx", reason="untested: 8 bits, for which onnx is needed (the export extra)")
DIM = 16


def test_as_few_groups_as_keep_the_limit():
    """The error falls by what each group is worth; two of the four are enough for half."""
    worth = {"a": 0.1, "b": 0.4, "c": 0.2, "d": 0.05}
    groups = [(name,) for name in worth]

    def error_of(names):
        return 1 - sum(worth[name] for name in names)

    assert wide.fewest(groups, error_of, 0.5) == {"b", "c"}
    assert wide.fewest(groups, error_of, 0.6) == {"b"}
    assert wide.fewest(groups, error_of, 0.0) == set(worth), "all, where no number keeps it"
    assert wide.fewest([], error_of, 0.5) == set()


def test_groups_of_a_graph():
    make = onnx.helper.make_node
    nodes = [make("MatMul", ["x", "w"], ["a"]), make("Reshape", ["a", "s"], ["b"]), make("Mul", ["b", "b"], ["y"])]
    floats = onnx.TensorProto.FLOAT
    graph = onnx.helper.make_graph(
        nodes, "g", [onnx.helper.make_tensor_value_info("x", floats, [2, 4])],
        [onnx.helper.make_tensor_value_info("y", floats, [4, 2])],
        [onnx.helper.make_tensor("w", floats, [4, 4], [0.0] * 16),
         onnx.helper.make_tensor("s", onnx.TensorProto.INT64, [2], [4, 2])],
    )  # fmt: skip
    model = onnx.helper.make_model(graph)
    assert list(wide.product_groups(model, "a8w8")) == [("x", "w")]
    assert list(wide.product_groups(model, "a16w8")) == [("w",)]
    assert list(wide.operator_groups(model, "a8w8")) == [("x",), ("a", "b"), ("y",)]
    assert list(wide.operator_groups(model, "a16w8")) == [("w",)]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["int8", "qnn"])
def test_an_error_is_kept_and_the_report_says_how(target, tmp_path):
    package = "onnxruntime_qnn" if target == "qnn" else "onnxruntime"
    pytest.importorskip(package, reason=f"untested: an error that is kept, for which {package} is needed")
    command = ["export", "--mixer", "padre:grid=4x4:kernel_size=3", "--dim", str(DIM), "--tokens", "16", "--target",
               target, "--max-error", "0.012", "--schemes", "a16w8", "--out", str(tmp_path / "out")]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 0
    report = json.loads((tmp_path / f"out/{target}/model-report.json").read_text())["a16w8"]
    assert report["in_16_bits"] and report["error"] <= 0.012 < min(each["error"] for each in report["tried"])
    entry = json.loads((tmp_path / "out/manifest.json").read_text())["files"][0]
    assert entry["tolerance"] == 0.012 and entry["error"] <= 0.012
    model = onnx.load(tmp_path / "out" / entry["path"])
    kinds = {part.data_type for part in model.graph.initializer if part.name.endswith("_quantized")}
    assert {onnx.TensorProto.INT8, onnx.TensorProto.INT16} <= kinds


@pytest.mark.slow
def test_a_mixer_alone_is_kept_within_the_aims(tmp_path):
    """Softmax attention is beyond 0.05 in 8 bits throughout, so that some of its products get 16 by themselves."""
    pytest.importorskip("onnxruntime", reason="untested: a limit by itself, for which onnxruntime is needed")
    torch.manual_seed(0)
    mixer, x = polymix.create_mixer("softmax", 32).eval(), 4 * torch.randn(2, 64, 32)
    polymix.export.export(mixer, x, tmp_path / "alone", ("int8",), schemes=("a8w8",))
    report = json.loads((tmp_path / "alone/int8/model-report.json").read_text())["a8w8"]
    assert report["in_16_bits"] and report["error"] <= 0.05 < min(each["error"] for each in report["tried"])

    model = torch.nn.Sequential(mixer).eval()  # a whole model has a wider limit, and keeps its 8 bits
    polymix.export.export(model, x, tmp_path / "whole", ("int8",), schemes=("a8w8",))
    assert "in_16_bits" not in json.loads((tmp_path / "whole/int8/model-report.json").read_text())["a8w8"]


@pytest.mark.parametrize(
    "name",
    slow_but(
        (),
        ["padre", "padre-3", "pom", "qt", "poly_sa", "poly_nl", "linear", "softmax"],
        ["padre-3", "pom", "qt", "softmax"],
    ),
)
def test_every_mixer_alone_is_within_the_aims(name, tmp_path):
    pytest.importorskip("onnxruntime", reason="untested: a limit by itself, for which onnxruntime is needed")
    grid = "" if name in ("pom", "qt", "poly_nl", "linear", "softmax") else ":grid=16x16"
    command = ["export", "--mixer", name + grid, "--dim", "64", "--tokens", "256", "--target", "int8"]
    with pytest.raises(SystemExit) as end:
        main([*command, "--out", str(tmp_path / "out")])
    assert end.value.code == 0
    report = json.loads((tmp_path / "out/int8/model-report.json").read_text())
    assert report["a8w8"]["error"] <= 0.05 and report["a16w8"]["error"] <= 0.01


@pytest.mark.slow
def test_weights_that_are_cut_out_of_others_are_quantised(tmp_path):
    """The parts of a fused projection are constants of the file, so that they are stored in 8 bits."""
    pytest.importorskip("onnxruntime", reason="untested: weights in 8 bits, for which onnxruntime is needed")
    mixer = polymix.create_mixer("qt", 64).eval()
    polymix.export.export(mixer, torch.randn(2, 16, 64), tmp_path / "out", ("int8",), schemes=("a8w8",))
    model = onnx.load(tmp_path / "out/int8/model-a8w8.onnx")
    large = [part.name for part in model.graph.initializer if part.data_type == 1 and len(part.raw_data) >= 4 * 64 * 64]
    assert not large, "weights in float32"


@pytest.mark.parametrize("value", [0, 1.0, -0.1, float("nan")])
def test_an_error_that_is_none(value, tmp_path):
    with pytest.raises(errors.OptionError, match="a number between 0 and 1"):
        polymix.export.export(
            polymix.create_mixer("pom", DIM).eval(), torch.randn(2, 8, DIM), tmp_path / "out", ("int8",),
            max_error=value,
        )  # fmt: skip
    assert not list(tmp_path.iterdir())


def test_an_error_without_quantised_targets_is_refused(tmp_path):
    with pytest.raises(errors.OptionError, match="without the target int8 or qnn"):
        polymix.export.export(
            polymix.create_mixer("pom", DIM).eval(), torch.randn(2, 8, DIM), tmp_path / "out", max_error=0.1
        )
