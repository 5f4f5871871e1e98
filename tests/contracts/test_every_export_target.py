"""What every export target promises: PyTorch's numbers, of every mixer and library; and refusals that leave nothing."""

import contextlib
import json
import sys

import pytest
import torch

import polymix
from polymix import errors
from polymix.export.modes import mixer_graphs, modes_of
from polymix.export.web import site
from polymix.export.write import PACKAGES, WRITERS
from tests.contracts.library_cases import HOSTS
from tests.contracts.mixer_cases import CASES
from tests.convert.checks import stirred
from tests.export.web_package import package_in
from tests.helpers import slow_but

pytestmark = pytest.mark.usefixtures("torchlib_once")
pytest.importorskip("onnxruntime", reason="untested: exports, for which onnxruntime is needed (the export extra)")
DIM, TOKENS = 12, 12
# The other targets make a file of the float graph, or of the program, that their own tests follow further.
RUNTIMES = {"qnn": "onnxruntime_qnn", "openvino": "openvino", "executorch": "executorch.runtime"}
QUANTISED = ("int8", "qnn")
SLOW = ("aoti", "executorch", "qnn")
# Whose graphs have operators of all kinds: each takes some seconds a mode.
EXPORTED = ("softmax", "padre-2", "padre-causal", "pom", "qt", "poly_nl", "poly_sa", "linear", "mamba", "knn")
REFUSED = {("knn", "mask")}  # docs/export/onnx.md says why
every_target = pytest.mark.parametrize("target", WRITERS)


def built(case):
    name, options = CASES[case]
    torch.manual_seed(0)
    return polymix.create_mixer(name, DIM, **options).eval()


@pytest.fixture
def options(tmp_path, monkeypatch):
    """What a target takes besides: for web a folder with the names of npm's package, and neither Node.js nor timing."""
    folder = package_in(tmp_path)
    monkeypatch.setattr(site, "node", lambda: None)
    monkeypatch.setattr(site, "curves", lambda models: [])
    return {"web": {"runtime": folder}}


def test_every_target_is_in_the_help():
    assert all(f'"{target}"' in polymix.export.export.__doc__ for target in WRITERS)


@pytest.mark.filterwarnings("ignore")  # of ExecuTorch's dependencies
@pytest.mark.parametrize("target", [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in WRITERS])
def test_its_files_give_the_numbers_of_pytorch_and_are_checked_again(target, options, tmp_path):
    if target in RUNTIMES:
        pytest.importorskip(RUNTIMES[target], reason=f"untested: {target} (its extra)")
    out = tmp_path / "out"
    x = torch.randn(2, TOKENS, DIM)
    content = polymix.export.export(built("pom"), x, out, targets=(target,), **options.get(target, {}))
    assert json.loads((out / "manifest.json").read_text())["files"] == content["files"]
    assert {entry["target"] for entry in content["files"]} == {target}
    for entry in content["files"]:
        assert entry["error"] <= entry["tolerance"]
        assert target in QUANTISED or entry["error"] <= 1e-5
        assert all((out / entry[name]).is_file() for name in ("path", "inputs", "outputs"))
    assert all(result.passed for result in polymix.export.check(out))


@every_target
def test_what_cannot_be_exported_is_refused_before_anything_is_written(target, options, tmp_path):
    if target in RUNTIMES and target in PACKAGES:
        pytest.importorskip(RUNTIMES[target], reason=f"untested: {target} (its extra)")
    before = list(tmp_path.iterdir())
    for model, x in (
        (built("pom").train(), torch.zeros(2, 4, DIM)),
        (built("pom"), torch.full((2, 4, DIM), torch.nan)),
    ):
        with pytest.raises((errors.OptionError, errors.ShapeError), match=r"model\.eval|finite"):
            polymix.export.export(model, x, tmp_path / "out", targets=(target,), **options.get(target, {}))
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("target", [*PACKAGES, "executorch"])
def test_without_its_libraries_one_line_says_what_to_install(target, options, tmp_path, monkeypatch):
    before = list(tmp_path.iterdir())
    for package in PACKAGES.get(target, ("executorch",)):
        with monkeypatch.context() as patch:
            for name in [name for name in sys.modules if name.partition(".")[0] == package]:
                patch.delitem(sys.modules, name)
            patch.setitem(sys.modules, package, None)
            with pytest.raises(errors.MissingExtraError, match=r"Install .* with: pip install .*\.\[(export|mobile)"):
                polymix.export.export(
                    built("pom"), torch.zeros(2, 4, DIM), tmp_path / "out", (target,), **options.get(target, {})
                )
    assert list(tmp_path.iterdir()) == before


@pytest.mark.parametrize("case", slow_but((), CASES, EXPORTED))
def test_every_mixer_in_every_mode(case, tmp_path):
    """Each mode that a mixer has exports and gives PyTorch's numbers, or `export_graphs` raises."""
    mixer = built(case)
    for mode in modes_of(mixer):
        if (mixer.name, mode) in REFUSED:  # with some options
            with contextlib.suppress(errors.CapabilityError, errors.ParityError):
                polymix.export.export_graphs(mixer_graphs(mixer, TOKENS, modes=(mode,)), tmp_path / mode)
            continue
        content = polymix.export.export_graphs(mixer_graphs(mixer, TOKENS, modes=(mode,)), tmp_path / mode)
        assert max(entry["error"] for entry in content["files"]) <= 1e-5
        assert content["files"][0]["free"][:1] == ["batch"]


@pytest.mark.slow
@pytest.mark.parametrize("library", HOSTS)
def test_whole_converted_models_of_every_library(library, tmp_path):
    torch.manual_seed(0)
    case = HOSTS[library]
    model = polymix.convert(stirred(case.build().eval()), "pom").model.eval()
    content = polymix.export.export(model, case.inputs(), tmp_path / "out")
    assert max(entry["error"] for entry in content["files"]) <= 1e-5
    assert content["files"][0]["free"] == ["batch"]
