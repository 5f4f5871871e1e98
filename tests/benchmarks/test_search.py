"""benchmarks/search.py: a search is saved with its figures; what cannot be fetched is skipped."""

import json
import sys
from pathlib import Path

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.workflows.search import stages
from tests.workflows.search.helpers import encoder, fixed_times

ROOT = Path(__file__).parents[2]
cure_torchvision()
pytest.importorskip("transformers", reason="untested: models of transformers")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setattr(stages, "layer_times", fixed_times)
    monkeypatch.delitem(sys.modules, "search", raising=False)
    import search

    yield search
    sys.modules.pop("search")


@pytest.mark.slow
def test_a_row_is_saved_for_each_seed_and_not_made_again(script, monkeypatch, tmp_path, capsys):
    def small(folder):
        if (folder / "gone").exists():
            raise script.AbsentError("the package is not there")
        return script.Host(encoder(), [torch.randn(16, 9, 16) for _ in range(8)])

    monkeypatch.setitem(script.HOSTS, "vit", small)
    monkeypatch.setattr(script, "MIXERS", ("qt", "pom", "keep"))
    out = tmp_path / "o.json"
    monkeypatch.setattr(
        sys, "argv", ["search.py", str(out), "--hosts", "vit", "--seeds", "2", "--folder", str(tmp_path)]
    )
    threads = torch.get_num_threads()
    try:
        script.main()
        rows = json.loads(out.read_text())["rows"]
        assert [(row["host"], row["seed"]) for row in rows] == [("vit", 0), ("vit", 1)]
        assert all(row["points"] and row["rules"] and row["damages"] for row in rows)
        (tmp_path / "gone").touch()
        script.main()  # both are done
        assert json.loads(out.read_text())["rows"] == rows
        out.unlink()
        script.main()
    finally:
        torch.set_num_threads(threads)
    assert capsys.readouterr().out.endswith("Skipped: the package is not there.\n") and not out.exists()


def test_text_is_cut_into_windows_of_bytes(script):
    ids = script.windows("ab" * 300)
    assert ids.shape == (2, script.WINDOW) and ids[0, :2].tolist() == [97, 98]
