"""ONNX files: names, free axes, refusals, and folders that are whole or not there."""

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

import polymix
from polymix import errors
from polymix.export import write
from polymix.export.graph import Graph
from polymix.export.manifest import difference
from polymix.export.modes import mixer_graphs
from tests.contracts.mixer_cases import CASES

pytest.importorskip("onnxruntime", reason="untested: ONNX files, for which onnxruntime is needed (the export extra)")
DIM, TOKENS = 12, 12


def built(case):
    name, options = CASES[case]
    torch.manual_seed(0)
    return polymix.create_mixer(name, DIM, **options).eval()


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """PoM in three modes in one folder."""
    out = tmp_path_factory.mktemp("export") / "pom"
    content = polymix.export.export_graphs(mixer_graphs(built("pom"), TOKENS, modes=("self", "cross", "mask")), out)
    return out, content


@pytest.mark.slow
def test_the_manifest_names_files_arrays_and_free_axes(exported):
    out, content = exported
    assert json.loads((out / "manifest.json").read_text())["files"] == content["files"]
    entries = {entry["path"]: entry for entry in content["files"]}
    assert list(entries) == ["onnx/self.onnx", "onnx/cross.onnx", "onnx/mask.onnx"]
    assert entries["onnx/cross.onnx"]["free"] == ["batch", "context_tokens", "tokens"]
    for entry in content["files"]:
        assert {"path", "target", "inputs", "outputs", "tolerance"} <= set(entry) and entry["error"] <= entry[
            "tolerance"
        ]
    sizes = {np.load(out / entry["inputs"])["x"].shape[:2] for entry in content["files"] if "self" in entry["path"]}
    assert sizes == {(2, TOKENS), (3, TOKENS), (1, TOKENS), (2, TOKENS // 2 + 1)}, "other batches, other lengths"


def test_names_and_metadata(exported):
    import onnx

    model = onnx.load(exported[0] / "onnx/cross.onnx")
    assert [part.name for part in model.graph.input] == ["x", "context"]
    assert [part.name for part in model.graph.output] == ["output"]
    axes = [
        [axis.dim_param or axis.dim_value for axis in part.type.tensor_type.shape.dim] for part in model.graph.input
    ]
    assert axes == [["batch", "tokens", DIM], ["batch", "context_tokens", DIM]]
    said = {prop.key: prop.value for prop in model.metadata_props}
    assert said["polymix_version"] == polymix.__version__ and json.loads(said["config"])["name"] == "pom"
    assert said["source"] == "mixer pom" and said["mode"] == "cross"
    assert {each.domain for each in model.opset_import} == {""} and model.opset_import[0].version >= 20


def test_check_needs_no_torch(exported):
    code = ("import sys; sys.modules['torch'] = None; import runpy; sys.argv = ['check', sys.argv[1]];"
            "sys.orig_argv = ['python', '-m', 'polymix.export.check'];"
            "runpy.run_module('polymix.export.check', run_name='__main__')")  # fmt: skip
    run = subprocess.run([sys.executable, "-c", code, str(exported[0])], capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    assert run.stdout.splitlines()[-1].startswith(f"{len(exported[1]['files'])} of ")


def test_check_notices_other_numbers_and_damage(exported, tmp_path):
    import shutil

    from polymix.export.check import main

    for change in ("numbers", "file", "arrays", "missing"):
        out = tmp_path / change
        shutil.copytree(exported[0], out)
        if change == "numbers":
            with np.load(out / "check/self-outputs.npz") as arrays:
                wrong = {name: array * 1.001 for name, array in arrays.items()}
            np.savez(out / "check/self-outputs.npz", **wrong)
        elif change == "file":
            (out / "onnx/self.onnx").write_bytes(b"no graph")
        elif change == "arrays":
            (out / "check/self-inputs.npz").write_bytes(b"no arrays")
        else:
            (out / "onnx/self.onnx").unlink()
        assert main([str(out)]) == 2, change
    with pytest.raises(errors.DataError, match=r"a folder with manifest\.json"):
        polymix.export.check(tmp_path)


def test_the_function_stays_callable_beside_the_module(exported):
    import polymix.export.check

    assert all(result.passed for result in polymix.export.check(exported[0]))


@pytest.mark.slow
def test_a_file_with_other_numbers_is_kept_aside(monkeypatch, tmp_path):
    """The folder itself does not appear, so that nobody takes it for a sound export."""
    monkeypatch.setattr(write, "TOLERANCE", 0.0)

    def exact(graph, folder, made, shared, data):
        return [write.Written(each.path, -1.0, each.free) for each in onnx(graph, folder, made, shared, data)]

    onnx = write.WRITERS["onnx"]
    monkeypatch.setitem(write.WRITERS, "onnx", exact)
    for _ in range(2):  # a second failure replaces the first
        with pytest.raises(errors.ParityError, match="pom-failed"):
            polymix.export.export(built("pom"), torch.randn(2, 4, DIM), tmp_path / "pom")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["pom-failed"]
    assert (tmp_path / "pom-failed/onnx/model.onnx").is_file()


class _OwnOperator(nn.Module):
    def forward(self, x):
        return torch.linalg.matrix_exp(x @ x.transpose(1, 2))


@pytest.mark.parametrize(
    ("change", "error", "said"),
    [
        (lambda: {"targets": ("onyx",)}, errors.OptionError, "one of onnx"),
        (lambda: {"targets": ("onnx", "onnx")}, errors.OptionError, "different targets"),
        (lambda: {"inputs": torch.full((1, 4, DIM), torch.nan)}, errors.ShapeError, "finite values"),
        (lambda: {"inputs": torch.randn(1, 4, DIM).double()}, errors.ShapeError, "float32"),
        (lambda: {"inputs": ("text",)}, errors.ShapeError, "a tensor"),
        (lambda: {"inputs": ()}, errors.ShapeError, "at least one tensor"),
        (lambda: {"inputs": torch.randn(1, 4, DIM + 1)}, errors.InputError, "what the model takes"),
        (lambda: {"model": built("pom").train()}, errors.OptionError, "Call model.eval"),
        (lambda: {"model": built("pom").bfloat16()}, errors.OptionError, "float32 weights"),
        (lambda: {"model": polymix.create_mixer("pom", DIM, impl="native").eval()}, errors.OptionError, "impl"),
        (lambda: {"model": _OwnOperator().eval()}, errors.CapabilityError, "which cannot be exported"),
    ],
)  # fmt: skip
def test_mistakes_are_named_and_leave_nothing(change, error, said, tmp_path):
    arguments = {"model": built("pom"), "inputs": torch.randn(1, 4, DIM), "out": tmp_path / "out", **change()}
    with pytest.raises(error, match=said):
        polymix.export.export(**arguments)
    assert not list(tmp_path.iterdir())


def test_a_folder_with_files_is_left_alone(tmp_path):
    (tmp_path / "note.txt").write_text("mine")
    with pytest.raises(errors.OptionError, match="not empty"):
        polymix.export.export(built("pom"), torch.randn(1, 4, DIM), tmp_path)


def test_modes_that_a_mixer_lacks_are_refused():
    with pytest.raises(errors.CapabilityError):
        mixer_graphs(built("padre-2"), TOKENS, modes=("cross",))
    with pytest.raises(errors.OptionError, match="some of self"):
        mixer_graphs(built("pom"), TOKENS, modes=("sideways",))


def test_other_sizes_that_a_model_refuses_are_not_free(tmp_path):
    """A model for one batch size exports with that size."""

    class Two(nn.Module):
        def forward(self, x):
            if x.shape[0] != 2:
                raise ValueError("two samples, please")
            return {"twice": 2 * x}

    content = polymix.export.export(Two().eval(), torch.randn(2, 3), tmp_path / "out")
    assert [entry["free"] for entry in content["files"]] == [[]]


def test_difference_counts_nan_shapes_and_missing_outputs():
    one = {"y": np.array([1.0, 2.0])}
    assert difference({"y": np.array([1.0, 2.2])}, one) == pytest.approx(0.1)
    assert difference({}, one) == difference({"y": np.ones(3)}, one) == difference({"y": np.array([1, np.nan])}, one)
    assert difference(one, one) == 0 and difference({}, one) == np.inf


def test_inputs_by_place_by_name_and_alone(tmp_path):
    x, mask = torch.randn(2, 4, DIM), torch.ones(2, 4, dtype=torch.bool)
    assert Graph.of(built("pom"), x).inputs.keys() == {"x"}
    assert list(Graph.of(built("pom"), {"x": x, "mask": mask}).inputs) == ["x", "mask"]
    assert list(Graph.of(built("pom"), (x, x)).inputs) == ["x", "context"]
