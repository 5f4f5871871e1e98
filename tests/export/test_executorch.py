"""Programs of ExecuTorch, run by its own runtime."""

import json
import sys

import pytest
import torch

import polymix
from polymix import errors
from polymix.export import manifest

DIM = 16
HERE = "untested: ExecuTorch (the mobile extra)"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of ExecuTorch's dependencies
@pytest.mark.parametrize("mixer", ["softmax", "padre", "pom", "linear", "poly_nl", "qt"])
def test_a_program_gives_the_numbers_of_pytorch(mixer, tmp_path):
    pytest.importorskip("executorch.runtime", reason=HERE)
    torch.manual_seed(0)
    built = polymix.create_mixer(mixer, DIM, **({"grid": (4, 4)} if mixer == "padre" else {})).eval()
    content = polymix.export.export(built, torch.randn(2, 16, DIM), tmp_path / "out", targets=("executorch",))
    (entry,) = content["files"]
    assert entry["path"].endswith(".pte") and entry["error"] <= 1e-5 and entry["xnnpack_parts"] >= 1
    assert all(result.passed for result in polymix.export.check(tmp_path / "out"))
    (tmp_path / "out" / entry["output_names"]).unlink()
    with pytest.raises(errors.DataError, match=r"without executorch/model\.json"):
        polymix.export.check(tmp_path / "out")


def test_check_says_that_executorch_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "executorch", None)
    monkeypatch.setitem(sys.modules, "executorch.runtime", None)
    (tmp_path / "model.json").write_text(json.dumps({"outputs": ["output"]}))
    with pytest.raises(errors.MissingExtraError, match="mobile"):
        manifest.run("executorch", tmp_path / "model.pte", {})
