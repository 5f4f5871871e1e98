"""`--init` with a folder that is of no use: one line that says why."""

import pytest
import torch

from polymix.cli import main

SMALL = {
    "classify": ("--set=dim=16", "--set=depth=1", "--set=image_size=8"),
    "detect": ("--preset=tiny",),
    "segment": ("--preset=tiny",),
    "text": ("--preset=tiny",),
}


def error_of(capsys, domain, init, out):
    with pytest.raises(SystemExit) as stop:
        main(["train", domain, "--init", str(init), "--out", str(out), "--set=steps=1", "--set=control=False", "--threads=1",
              *SMALL[domain]])  # fmt: skip
    error = capsys.readouterr().err
    assert stop.value.code == 2 and len(error.splitlines()) == 1, error
    return error


@pytest.mark.parametrize("domain", sorted(SMALL))
def test_folders_without_weights_are_refused_before_any_work(domain, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    for folder in ("nowhere", "empty"):
        assert folder in error_of(capsys, domain, tmp_path / folder, tmp_path / "out")
    (tmp_path / "torn").mkdir()
    (tmp_path / "torn" / "model.pt").write_bytes(b"half a file")
    assert "cannot be read" in error_of(capsys, domain, tmp_path / "torn", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("domain", sorted(SMALL))
def test_weights_of_other_shapes_are_named(domain, tmp_path, capsys):
    torch.save({"other.weight": torch.zeros(3, 5)}, tmp_path / "model.pt")
    error = error_of(capsys, domain, tmp_path, tmp_path / "out")
    assert "Use the mixer and the sizes" in error
    assert not (tmp_path / "out" / "results.json").exists(), "something was trained"
