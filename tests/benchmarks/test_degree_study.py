"""benchmarks/degree_study.py: each option changes what it names, and an interrupted study goes on where it stopped."""

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

ROOT = Path(__file__).parents[2]
SMALL = ("--quick", "--only", "2", "--bases", "monomial", "--normalize", "none")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    import degree_study

    return degree_study


def study(script, monkeypatch, folder, *options):
    monkeypatch.setattr("sys.argv", ["degree_study.py", "--out", str(folder), *SMALL, *options])
    script.main()
    return json.loads((folder / "results.json").read_text())


def test_only_the_bases_degrees_and_precisions_that_are_asked_for(script):
    found = list(script.runs([1, 3], 2, ["chebyshev", "legendre"], [None], ["float32", "float16"]))
    assert len(found) == 2 * 2 * (1 + 2), "at degree 1 all bases are one"
    assert {run["basis"] for run in found if run["degree"] == 1} == {"chebyshev"}
    assert {run["precision"] for run in found} == {"float32", "float16"}


@pytest.mark.parametrize(
    ("host", "blocks", "channels"), [("tight", 1, 8), ("roomy", 2, 32), ("deep", 8, 16), ("text", 8, 64)]
)
def test_a_host_has_its_blocks(script, host, blocks, channels):
    kind, options = script.HOSTS[host]
    run = {"degree": 2, "basis": "legendre", "normalize": "rms", "seed": 0, "precision": "float32"}
    model = kind(options).build(run, None if host != "text" else SimpleNamespace(vocab=9, end=None, tokenizer=None))
    mixers = [mixer for mixer in model.modules() if isinstance(mixer, script.polymix.PadreMixer)]
    assert len(mixers) == blocks and {mixer.dim for mixer in mixers} == {channels}
    found = {(mixer.config.degree, mixer.config.basis, mixer.config.normalize) for mixer in mixers}
    assert found == {(2, "legendre", "rms")} and {mixer.config.weight for mixer in mixers} == {"channel"}
    if host != "text":
        assert model(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


@pytest.mark.slow
def test_text_is_judged_by_its_held_out_loss(script, monkeypatch, tmp_path, capsys):
    """Without clipping too: the recipe of text is another one than that of digits."""
    content = study(script, monkeypatch, tmp_path, "--host", "text", "--unclipped")
    (row,) = content["rows"]
    assert content["recipe"]["clip"] is None and content["recipe"]["epochs"] == 0.01
    assert 5 < row["loss"] < 6.24, "below guessing among 512 tokens, ln 512"
    assert (
        row["at_init"] != row["trained"] and f"| monomial | as it is | {row['loss']:.3f} |" in capsys.readouterr().out
    )


def test_a_study_goes_on_where_it_stopped_and_a_precision_changes_it(script, monkeypatch, tmp_path, capsys):
    first = study(script, monkeypatch, tmp_path / "a")
    again = study(script, monkeypatch, tmp_path / "a", "--precisions", "float32", "bfloat16")
    assert again["rows"][0] == first["rows"][0], "a run that was done is not done again"
    plain, low = again["rows"]
    assert (plain["precision"], low["precision"]) == ("float32", "bfloat16")
    assert plain["losses"] != low["losses"] and plain["at_init"] == low["at_init"]
    assert "bfloat16\n| basis" in capsys.readouterr().out
    with pytest.raises(SystemExit, match="other settings"):
        study(script, monkeypatch, tmp_path / "a", "--unclipped")


def test_a_training_without_clipping_that_diverges_is_a_row_without_an_accuracy(script, monkeypatch, tmp_path):
    from polymix.errors import OptionError

    def diverge(*arguments):
        raise OptionError("loss", "not finite", "finite", "")

    tasks = []
    monkeypatch.setattr(script, "train_in_memory", lambda task, data, make: (tasks.append(task), make(), diverge())[2])
    content = study(script, monkeypatch, tmp_path, "--unclipped")
    assert tasks[0].recipe.clip is None is content["recipe"]["clip"] and script.Digits({}).recipe.clip is not None
    (row,) = content["rows"]
    assert row["accuracy"] is None and row["losses"] == [] and row["trained"]["rms"] > 0
    assert "– (1 diverged)" in script.table(content["rows"])
