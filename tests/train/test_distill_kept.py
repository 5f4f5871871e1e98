"""A distillation never leaves a worse model than it had, and says where the result is worse than its start."""

import copy
import json
from functools import cache
from pathlib import Path

import pytest
import torch
from torch import nn

import polymix
from polymix.cli import main
from polymix.convert.report import ConversionReport
from polymix.errors import OptionError
from polymix.train.distill import accuracy, distill, perplexity, stages
from polymix.train.distill.metrics import better
from polymix.workflows.convert.page import next_commands
from tests.train.distilled import BATCHES, bits, converted, differing, vit

RUINOUS = {"imitate_epochs": 0, "epochs": 1, "learning_rate": 10.0}


@cache
def _learned():
    host, torch_state = vit(), torch.random.get_rng_state()
    optimizer = torch.optim.AdamW(host.parameters(), 1e-2)
    for _ in range(6):
        for images, labels in BATCHES:
            optimizer.zero_grad()
            nn.functional.cross_entropy(host(images), labels).backward()
            optimizer.step()
    torch.random.set_rng_state(torch_state)
    return host.eval()


def taught():
    """A host that knows the labels of the batches."""
    return copy.deepcopy(_learned())


def test_a_ruined_model_gets_back_the_weights_of_its_best_stage():
    """Fine-tuning at an absurd rate: the model is what it was after the conversion, and the report says which it has."""
    said, report = [], converted(taught())
    before = bits(report.model)
    done = distill(report, BATCHES, val=BATCHES, say=said.append, **RUINOUS)
    assert done.accuracy["distilled"] == done.accuracy["converted"] == report.result
    assert report.kept == done.kept == "converted" and not differing(before, bits(report.model))
    assert any("the weights from before its first step are kept" in line for line in said)
    assert said[-1] == report.unimproved == str(report).splitlines()[-1] and said[-1].startswith("WARNING")
    assert "converted (kept)" in str(report)
    assert accuracy(report.model, BATCHES, lambda model, batch: model(batch[0]), "cpu") == done.accuracy["converted"]
    report.undo()


def test_the_user_s_held_out_data_decide_between_stages():
    """Wrong labels are learnt well, what was held back included; on true ones the model is worse."""
    said, report = [], converted(taught())
    wrong = [(images, (labels + 1) % 4) for images, labels in BATCHES]
    done = distill(
        report, wrong, val=BATCHES, say=said.append, imitate_epochs=0, epochs=4, learning_rate=1e-2, teacher=0.0
    )
    assert done.held_back["distilled"] < done.held_back["converted"], "the case is none"
    assert done.accuracy["distilled"] < done.accuracy["converted"] == report.result and done.kept == "converted"
    assert "stage converted are kept" in said[-2]


def test_the_last_weights_stay_where_they_are_asked_for():
    report = converted(taught())
    before = bits(report.model)
    done = distill(report, BATCHES, val=BATCHES, keep="last", **RUINOUS)
    assert differing(before, bits(report.model)) and not done.held_back and report.unimproved is None
    with pytest.raises(OptionError, match="'best', 'last'"):
        distill(converted(), BATCHES, keep="first")


@pytest.mark.parametrize(
    "options", [{}, {"val": BATCHES, "metric": lambda *call: 1.0}], ids=["unmeasured", "own metric"]
)
def test_without_a_metric_what_was_held_back_decides(options):
    report = converted(taught())
    before = bits(report.model)
    done = distill(report, BATCHES, **RUINOUS, **options)
    assert done.kept == "converted" and not differing(before, bits(report.model))
    assert done.held_back["distilled"] == done.held_back["converted"]


def test_metrics_of_polymix_have_a_direction():
    assert better(accuracy, 0.9, 0.8) is True is better(perplexity, 8.0, 9.0)
    assert better(accuracy, 0.8, 0.8) is False and better(print, 1.0, 2.0) is None


@pytest.mark.parametrize(("kind", "before", "after", "said"), [
    ("accuracy", 0.9, 0.8, "its accuracy is 80.0 %, not 90.0 %"), ("accuracy", 0.9, 0.895, None),
    ("perplexity", 20.0, 30.0, "its perplexity is 30, not 20"), ("perplexity", 20.0, 18.0, None),
])  # fmt: skip
def test_a_result_worse_than_its_start_is_a_sentence(kind, before, after, said):
    report = ConversionReport(nn.Linear(1, 1), {}, (), ())
    report.metric, report.accuracy = kind, {"before": before, "converted": 0.1, "distilled": after}
    assert report.worse is None if said is None else said in report.worse


def test_what_to_run_next_after_a_worse_result():
    content = {
        "conversion": {"accuracy": {"before": 0.8, "converted": 0.7, "distilled": 0.3}, "kept": "converted"},
        "settings": {"model": "m", "plan": "qt", "data": "my photos", "distill_epochs": 1, "learning_rate": 4e-4},
        "worse": True,
    }  # fmt: skip
    (why, command), *_ = next_commands(content, Path("out"))
    assert "worse than the original" in why and "lower rate" in why
    assert command == (
        "polymix convert --model m --plan qt --data 'my photos' --distill-epochs 10 --learning-rate 0.0001 --out out-longer"
    )
    content["settings"] |= {"plan": "1:1", "mixer": "pom:degree=3", "weights": "my w.pt", "windows": "merge"}
    content["settings"] |= {"multi_scale": False, "keep_host": True, "positions": None}
    (_, command), *_ = next_commands(content, Path("out"))
    asked = "--plan 1:1 --mixer pom:degree=3 --weights 'my w.pt' --windows merge --no-multi-scale --keep-host"
    assert command.startswith(f"polymix convert --model m {asked} --data")


@pytest.mark.slow
def test_the_command_has_the_rate_and_says_that_the_result_is_worse(tmp_path, monkeypatch, capsys):
    """A ruinous rate from the command line: the card's figure, the page and the terminal are of what is saved."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(stages.FineTuning, "held_back_loss", lambda self, process: 0.5 if self.done else 0.1)
    torch.save(taught().state_dict(), "w.pt")
    Path("mine.py").write_text(
        "import torch, polymix\nfrom polymix.models import VisionTransformer\ndef vit():\n"
        "    model = VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=16, depth=2,\n"
        "                              classes=10, channels=1, mlp_ratio=2)\n"
        "    state = torch.load('w.pt')\n    del state['head.weight'], state['head.bias']\n"
        "    model.load_state_dict(state, strict=False)\n    return model, None\n"
    )
    words = ["convert", "--model", "mine.py:vit", "--plan", "pom", "--data", "digits", "--seconds", "0.05"]
    words += ["--lengths", "1", "--threads", "1", "--distill-epochs", "1", "--imitate-epochs", "0", "--out", "out"]
    with pytest.raises(SystemExit) as stop:
        main([*words, "--learning-rate", "10"])
    said = capsys.readouterr().out
    assert not stop.value.code
    conversion = json.loads(Path("out/results.json").read_text())["conversion"]
    result = conversion["accuracy"]
    assert result["converted"] == result["distilled"] and conversion["kept"] == "converted"
    assert f"{result['converted']}" in Path("out/README.md").read_text()
    assert "converted (this model)" in Path("out/report.html").read_text()
    assert "WARNING: training made" in Path("out/README.md").read_text()
    loaded = polymix.load_pretrained("out", trust=True)
    assert all(bool(part.isfinite().all()) for part in loaded.parameters())
    assert f"{result['converted']:.1%}"[:-1] in said and said.split("\n\n")[-1].startswith("WARNING")
    with pytest.raises(SystemExit):
        main([*words[:-4], "--out", "none", "--learning-rate", "1e-4", "--distill-epochs", "0"])
    assert "--learning-rate" in capsys.readouterr().err
