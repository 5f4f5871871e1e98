"""benchmarks/scaling.py: models of one size and one schedule, whose rows are saved one by one and continued."""

import io
import json
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from polymix.domains.text.model import build_model, model_config
from polymix.train.data import idx
from tests.domains.idx_files import write_idx

ROOT = Path(__file__).parents[2]


def corpus(path):
    """A package of 60 small texts as the Brown corpus has them: words with their parts of speech."""
    words = "the/at jury/nn said/vbd that/cs it/pps did/dod not/* find/vb any/dti evidence/nn ./."
    with tarfile.open(path, "w:gz") as archive:
        for number in range(60):
            text = f"\n\n\t{words}\n\n\tno/at {number}/cd irregularities/nns took/vbd place/nn ./.\n".encode() * 9
            entry = tarfile.TarInfo(f"package/c{'abc'[number % 3]}{number:02}")
            entry.size = len(text)
            archive.addfile(entry, io.BytesIO(text))


@pytest.fixture
def script(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import scaling

    corpus(tmp_path / "corpus.tgz")
    scaling.texts.cache_clear()
    with tarfile.open(tmp_path / "corpus.tgz") as archive:
        archive.extractall(tmp_path / "texts", filter="data")
    monkeypatch.setattr(scaling, "fetched", lambda package, folder: tmp_path / "texts")
    monkeypatch.setattr(idx, "INSTALLED", write_idx(tmp_path / "set", (28, 28)))
    monkeypatch.setattr(scaling, "SIZES", {"small": 16, "large": 32})
    monkeypatch.setattr(scaling, "DEPTH", 2)
    text = scaling.TEXT.changed(context=8, batch_size=2, steps=2, vocab=300, evaluate_tokens=64)
    monkeypatch.setattr(scaling, "TEXT", text)
    monkeypatch.setattr(scaling, "FASHION", scaling.FASHION.changed(depth=2, batch_size=4, steps=2))
    monkeypatch.chdir(tmp_path)

    def run(*options):
        monkeypatch.setattr(sys, "argv", ["scaling.py", "out.json", "--data-folder", "kept", *options])
        scaling.main()
        return json.loads(Path("out.json").read_text())["rows"]

    run.module = scaling
    return run


def keys(rows):
    return [(row["task"], row["mixer"], row["size"], row["seed"]) for row in rows]


@pytest.mark.slow
def test_rows_are_made_once_and_parts_share_them(script):
    first = script("--sizes", "small", "--mixers", "pom;nothing")
    assert keys(first) == [(task, mixer, "small", 0) for task in ("text", "fashion") for mixer in ("pom", "nothing")]
    for row in first:
        assert row["val_loss"] > 0 and row["in_layers"] < row["parameters"] and row["impl"] == "auto"
    assert all(row["bits_per_byte"] > 0 for row in first[:2]) and first[0]["ran"] == ["pom: eager"]
    assert all(row["accuracy"] * 4 % 1 == 0 for row in first[2:]), "of the four test pictures"
    script("--mixers", "pom;nothing", "--part", "0/2")
    both = script("--mixers", "pom;nothing", "--part", "1/2")
    assert both[:4] == first and len(set(keys(both))) == len(both) == 8
    assert script("--budget", "0", "--plot", "out.png") == both and Path("out.png").read_bytes()[1:4] == b"PNG"


def test_tables_have_the_mean_of_the_seeds_by_size(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    from _tables import figures, scaling

    for module in (figures, scaling):
        monkeypatch.setattr(module, "RESULTS", tmp_path)
    assert [part() for part in scaling.TABLES.values()] == ["Not measured yet."] * 3

    def row(task, mixer, size, seed, **more):
        counts = {"1M": (1_100_000, 1_000_000), "4M": (4_200_000, 4_000_000)}[size]
        return {"task": task, "mixer": mixer, "size": size, "seed": seed, "parameters": counts[0],
                "in_layers": counts[1], "seconds": 20.0, **more}  # fmt: skip

    rows = [row("text", "pom", "4M", 0, val_loss=3.0, bits_per_byte=1.5), row("text", "pom", "4M", 1, error="no memory"),
            row("fashion", "pom", "1M", 0, val_loss=0.5, accuracy=0.8), row("fashion", "padre", "4M", 0, diverged="at 3"),
            row("fashion", "pom", "1M", 1, val_loss=0.6, accuracy=0.9)]  # fmt: skip
    machine = {"gpu": "A card", "torch": "2.11"}
    content = {"rows": rows, "sizes": {"1M": 128, "4M": 256}, "machine": machine, "precision": "bfloat16", "parts": 8}
    (tmp_path / "scaling.json").write_text(json.dumps(content))
    assert scaling.setting().startswith("1 to 2 seeds of each; ± is half of the range over them. A card, torch 2.11, ")
    assert scaling.text().splitlines() == ["| mixer | 4.0 M in layers, 4.2 M in all |", "| --- | --- |",
                                           "| pom | 3.000 (1.500) |"]  # fmt: skip
    assert scaling.pictures().splitlines()[-1] == f"| pom | 0.550{figures.PLUS_MINUS}0.050 (85.0 %) |"


@pytest.mark.slow
def test_models_of_a_size_have_as_many_parameters(script, monkeypatch, tmp_path):
    """With its own feed-forward a model of pom would be a sixth larger than one of attention, and its loss lower."""
    module = script.module
    monkeypatch.setattr(module, "SIZES", {"1M": 128, "4M": 256, "16M": 512})
    monkeypatch.setattr(module, "DEPTH", 5)
    monkeypatch.setattr(module, "FASHION", module.FASHION.changed(depth=5))
    for size, expected in (("1M", 1e6), ("4M", 4e6), ("16M", 16e6)):
        for task in module.TASKS:
            counts = []
            for mixer in module.MIXERS[task]:
                row = {"task": task, "mixer": mixer, "size": size, "seed": 0, "impl": "auto"}
                its = module.TASKS[task](row, tmp_path, {"device": "cpu"})
                with torch.device("meta"):
                    model = build_model(model_config(its.recipe, 300)) if task == "text" else its._model(1, 10)
                counts.append(sum(p.numel() for p in model.parameters()) - module.outside(task, model))
            assert all(abs(count / counts[0] - 1) < 0.01 for count in counts), (task, size, counts)
            assert abs(counts[0] / expected - 1) < 0.05


def test_a_row_that_fails_is_tried_once_more_without_kernels(script, monkeypatch):
    """A kernel that fails may leave a GPU that only a new process can use."""
    module, begun = script.module, []

    def measured(row, task, data):
        if row["impl"] == "auto":
            raise RuntimeError("an illegal memory access was encountered\nmore")
        return {**row, "val_loss": 1.0}

    def begin(program, words):
        begun.append(words)
        raise SystemExit

    monkeypatch.setattr(module, "measured", measured)
    monkeypatch.setattr(module.os, "execv", begin)
    options = ("--only", "fashion", "--sizes", "small", "--mixers", "padre", "--budget", "60")
    with pytest.raises(SystemExit):
        script(*options)
    (row,) = json.loads(Path("out.json").read_text())["rows"]
    assert row["error"] == "RuntimeError: an illegal memory access was encountered more" and row["impl"] == "auto"
    assert begun[0][1:-2] == sys.argv and begun[0][-2] == "--budget" and 0 < float(begun[0][-1]) < 60
    (row,) = script(*options)
    assert row["impl"] == "eager" and row["val_loss"] == 1.0 and "error" not in row


def test_rows_of_two_schedules_are_not_mixed(script, monkeypatch, capsys):
    monkeypatch.setattr(script.module, "measured", lambda row, task, data: row)
    assert len(script("--only", "fashion", "--mixers", "pom")) == 2
    with pytest.raises(SystemExit):
        script("--precision", "float32")
    assert "another schedule" in capsys.readouterr().err


def test_no_row_starts_after_the_budget(script, capsys):
    with pytest.raises(FileNotFoundError):
        script("--budget", "0")
    assert capsys.readouterr().out == "The budget is spent.\n"
