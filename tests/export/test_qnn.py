"""Files for Qualcomm's tensor processor, run by its emulator."""

import json

import numpy as np
import pytest
import torch
from torch import nn

import polymix
from polymix import errors
from polymix.cli import main
from polymix.compat import cure_torchvision
from polymix.export import hexagon
from tests.helpers import slow_but

pytest.importorskip("onnxruntime_qnn", reason="untested: Hexagon, for which onnxruntime-qnn is needed (the qnn extra)")
DIM = 16


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """PADRe by the command, for a chip by its number."""
    out = tmp_path_factory.mktemp("qnn") / "out"
    command = ["export", "--mixer", "padre:grid=4x4:kernel_size=3", "--dim", str(DIM), "--tokens", "16", "--target",
               "qnn", "--soc", "43", "--out", str(out)]  # fmt: skip
    with pytest.raises(SystemExit) as end:
        main(command)
    assert end.value.code == 0
    return out


def entries(folder):
    return {entry["path"]: entry for entry in json.loads((folder / "manifest.json").read_text())["files"]}


@pytest.mark.slow
def test_the_manifest_says_what_was_compiled_for_which_chip(compiled):
    listed = entries(compiled)
    assert set(listed) == {
        f"qnn/model-{scheme}{end}" for scheme in ("a8w8", "a16w8") for end in (".onnx", "-context.onnx")
    }
    entry = listed["qnn/model-a8w8-context.onnx"]
    assert entry["chip"] == {
        "name": "snapdragon-8-gen-2",
        "model": "SM8550",
        "number": 43,
        "architecture": 73,
        "memory": 8,
    }
    assert (compiled / entry["binary"]).stat().st_size == entry["binary_bytes"] > 10_000
    assert (
        entry["operators"]["Conv"] == 1
        and entry["operators"]["Mul"] == 1
        and "QuantizeLinear" not in entry["operators"]
    )
    assert entry["largest_activation"] == 16 * 2 * DIM or entry["largest_activation"] == 16 * DIM
    assert "qnn-net-run" in entry["run"]
    assert entry["memory"] == {"reserved": 8 * 2**20, "spilled": 0}, "all of the chip's memory"


def test_the_emulator_gives_the_numbers_of_pytorch(compiled):
    listed = entries(compiled)
    assert 1e-4 < listed["qnn/model-a8w8-context.onnx"]["error"] < 0.06
    assert listed["qnn/model-a16w8-context.onnx"]["error"] < 0.5 * listed["qnn/model-a8w8-context.onnx"]["error"]
    results = polymix.export.check(compiled)
    assert len(results) == 4 and all(result.passed for result in results)


def test_everything_is_in_integers(compiled):
    import onnx

    graph = onnx.load(compiled / "qnn/model-a8w8.onnx").graph
    makers = {output: node.op_type for node in graph.node for output in node.output}
    for node in graph.node:
        if node.op_type not in ("QuantizeLinear", "DequantizeLinear", "Constant"):
            data = [name for name in node.input if name in makers]
            assert data and all(makers[name] in ("DequantizeLinear", "Constant") for name in data), node.name
    weights = [part for part in graph.initializer if len(part.dims) >= 2]
    assert weights and {part.data_type for part in weights} == {onnx.TensorProto.INT8}


class WithFourier(nn.Module):
    """The chip has no Fourier transform."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)

    def forward(self, x):
        return torch.fft.rfft(self.layer(x), dim=1).abs()


def test_the_first_operator_that_would_fall_back_is_named(tmp_path):
    with pytest.raises(errors.CapabilityError, match=r"DFT \(.*would run on the CPU"):
        polymix.export.export(WithFourier().eval(), torch.randn(1, 16, DIM), tmp_path / "out", targets=("qnn",))
    assert not list(tmp_path.iterdir()), "nothing half written"


@pytest.mark.parametrize("name", ["snapdragon-8-gen-3", "Snapdragon 8 Gen 3", "SM8650", "sm8650", "57"])
def test_a_chip_has_several_names(name):
    assert hexagon.chip_of(name) == ("snapdragon-8-gen-3", hexagon.Chip("SM8650", 57, 75, 8))


def test_mistakes_are_said_before_anything_is_computed(tmp_path):
    model, x = nn.Linear(4, 4).eval(), torch.randn(2, 4)
    with pytest.raises(errors.OptionError, match="snapdragon-8-elite"):
        polymix.export.export(model, x, tmp_path / "out", targets=("qnn",), soc="snapdragon-9")
    for schemes in ((), ("a4w4",), ("a8w8", "a8w8")):
        with pytest.raises(errors.OptionError, match="a8w8, a16w8"):
            polymix.export.export(model, x, tmp_path / "out", targets=("qnn",), schemes=schemes)
    for option in ({"soc": "SM8550"}, {"schemes": ("a16w8",)}):
        with pytest.raises(errors.OptionError, match="without the target"):
            polymix.export.export(model, x, tmp_path / "out", targets=("onnx",), **option)
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_batch_norms_keep_their_numbers_in_the_emulator(tmp_path):
    """The compiler's own batch norm of these values is off by 0.7: without the parts, the emulator's output is noise."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Unflatten(1, (32, 1, 1)), nn.BatchNorm2d(32)).eval()
    with torch.no_grad():
        model[3].weight.uniform_(0.5, 1.5)
        model[3].bias.normal_()
        model[3].running_mean.normal_()
        model[3].running_var.copy_(torch.linspace(1, 2, 32))
    content = polymix.export.export(model, torch.randn(64, 8), tmp_path / "out", targets=("qnn",), schemes=("a8w8",))
    quantised, compiled = content["files"]
    assert quantised["error"] < 0.03 and compiled["error"] < 0.03
    assert "BatchNormalization" not in compiled["operators"]


SPECS = ("padre:degree=3", "pom", "qt", "poly_nl", "poly_sa:grid=16x16", "linear", "softmax", "castling", "sima")


@pytest.mark.parametrize("spec", slow_but((), SPECS, SPECS[:4]))
def test_every_mixer_of_the_papers_compiles(spec, tmp_path):
    from polymix.export.modes import mixer_graphs
    from polymix.export.write import export_graphs
    from polymix.mixers.spec import parse_mixer

    torch.manual_seed(0)
    mixer = parse_mixer(spec, standalone=True)[1].build(64).eval()
    content = export_graphs(mixer_graphs(mixer, 256), tmp_path / "out", ("qnn",), schemes=("a16w8",))
    assert all(entry["error"] < 0.03 for entry in content["files"])


@pytest.mark.slow
def test_a_vision_transformer_compiles(tmp_path):
    cure_torchvision()
    timm = pytest.importorskip("timm", reason="untested: timm's models (the vision extra)")
    torch.manual_seed(0)
    model = timm.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=10).eval()
    images = torch.randn(4, 3, 64, 64)
    content = polymix.export.export(model, images, tmp_path / "out", targets=("qnn",), schemes=("a16w8",))
    counts = content["files"][1]["operators"]
    assert counts["LayerNormalization"] == 5 and counts["Softmax"] == 2
    inputs = np.load(tmp_path / "out" / content["files"][1]["inputs"])
    assert inputs["x"].shape == (1, 3, 64, 64), "one image at a time"
