"""benchmarks/runtimes.py: cells are kept, times are filled in, and what is not installed is skipped by its name."""

import json
import sys
from pathlib import Path

import pytest

from polymix.errors import MissingExtraError

pytest.importorskip("onnxruntime", reason="untested: ONNX Runtime (the export extra)")
pytest.importorskip("onnxscript", reason="untested: ONNX export (the export extra)")


@pytest.fixture
def run(monkeypatch, tmp_path):
    """The script with two mixers and ONNX Runtime and OpenVINO; returns the content of its file."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    import runtimes

    monkeypatch.setattr(runtimes, "MIXERS", ("softmax", "pom"))
    monkeypatch.setattr(runtimes, "RUNTIMES", {name: runtimes.RUNTIMES[name] for name in ("ONNX Runtime", "OpenVINO")})
    monkeypatch.setattr(runtimes, "use_one_thread", lambda: None)
    exported = runtimes.export.export

    def without_openvino(model, inputs, out, targets):
        if targets == ("openvino",):
            raise MissingExtraError("openvino", "openvino")
        return exported(model, inputs, out, targets)

    monkeypatch.setattr(runtimes.export, "export", without_openvino)
    out = tmp_path / "out.json"

    def call(*options):
        monkeypatch.setattr(sys, "argv", ["runtimes.py", str(out), *options])
        runtimes.main()
        return json.loads(out.read_text())

    return call


@pytest.mark.slow
def test_times_are_filled_in_and_then_kept(run, capsys):
    untimed = run("--quick", "--no-times")["rows"]
    assert [(row["tokens"], row["mixer"]) for row in untimed] == [
        (16, "softmax"), (16, "pom"), (64, "softmax"), (64, "pom")]  # fmt: skip
    assert all(row["error"] <= 1e-5 and row["ms"] is None and row["pytorch_ms"] is None for row in untimed)
    assert "OpenVINO: skipped" in capsys.readouterr().out
    timed = run("--quick")["rows"]
    assert len(timed) == 4 and all(row["ms"] > 0 and row["pytorch_ms"] > 0 for row in timed)
    assert run("--quick")["rows"] == timed, "a finished cell was measured again"
    assert run("--quick", "--no-times")["rows"] == timed, "times were lost"
    with pytest.raises(SystemExit):
        run()
    assert "another machine, PyTorch or --quick" in capsys.readouterr().err
