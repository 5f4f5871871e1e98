"""What `polymix convert` shows while it trains: bars on a terminal, lines elsewhere, where --resume goes on, and precision."""

import io
import json
import signal
from pathlib import Path

import pytest
import torch
from rich.console import Console

import polymix
from polymix.cli.shared import bars
from polymix.compat import cure_torchvision

cure_torchvision()
MINE = """
import torch, polymix
from polymix.models import VisionTransformer

def vit():
    torch.manual_seed(3)
    return VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=8, patch_size=4, dim=16, depth=1, classes=10, channels=1)
"""
WORDS = (
    "--model",
    "mine.py:vit",
    "--plan",
    "pom:expand=1",
    "--data",
    "digits",
    "--batch",
    "256",
    "--distill-epochs",
    "2",
)


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(MINE)
    return tmp_path


def state(folder="out"):
    return polymix.load_pretrained(folder, trust=True).state_dict()


def interrupt(*_, **__):
    signal.raise_signal(signal.SIGINT)


@pytest.mark.slow
def test_lines_where_there_is_no_terminal_and_where_a_resumed_run_goes_on(run, place, monkeypatch):
    with monkeypatch.context() as patch:
        from polymix.train.distill.stages import FineTuning

        end = FineTuning.after_step

        def stop(stage, step, numbers):
            end(stage, step, numbers)
            if step > stage.epoch_steps:
                interrupt()

        patch.setattr(FineTuning, "after_step", stop)
        status, out, _ = run(*WORDS)
    assert status == 130
    lines = out.splitlines()
    assert any(line.startswith("Imitation, epoch 1 of 1: loss ") for line in lines), out
    assert any(line.startswith("Fine-tuning, epoch 1 of 2: loss ") and "accuracy " in line for line in lines)
    assert any(line.startswith("Accuracy, imitated: ") and line.endswith(" %.") for line in lines)
    assert "━" not in out and "\r" not in out
    status, out, err = run(*WORDS, "--resume")
    assert (status, err) == (0, ""), err
    assert "The earlier run finished imitation (1 epoch)." in out
    assert "Continuing fine-tuning with epoch 2 of 2." in out
    assert "Fine-tuning, epoch 2 of 2: loss " in out and "epoch 1 of 2: loss" not in out
    run(*WORDS, "--out", "whole")
    assert all(torch.equal(value, state("whole")[name]) for name, value in state().items())


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_bars_on_a_terminal(run, place, monkeypatch, columns):
    """The epoch, the loss, the accuracy and the time left fit into the terminal; the bar where there is room for it."""
    shown = io.StringIO()
    terminal = Console(file=shown, force_terminal=True, width=columns, height=20)
    monkeypatch.setattr("polymix.cli.convert.Console", lambda: terminal)
    status, out, err = run(*WORDS)
    assert (status, err) == (0, ""), err
    text = shown.getvalue()
    assert "epoch 2/2, loss " in text and "accuracy " in text and "00:00" in text
    assert "…" not in text and ("━" in text) == (columns > 60)
    assert "epoch 1 of 2: loss" not in out + text, "bars and lines say the same twice"


def test_bars_of_tasks_without_notes():
    """As compare and bench use them."""
    shown = io.StringIO()
    with bars(Console(file=shown, force_terminal=True, width=80), Path("none")) as progress:
        progress.start("padre", 4)(3)
    assert "padre" in shown.getvalue() and "3/4" in shown.getvalue()


def test_mixed_precision_is_that_of_the_training(run, place, monkeypatch):
    """bf16-mixed computes products in bfloat16 while it trains, keeps float32 weights, and says so in the card."""
    seen = set()
    from polymix.train.distill.stages import FineTuning

    own = FineTuning.loss

    def watched(stage, model, batch):
        loss = own(stage, model, batch)
        with torch.no_grad():
            seen.add(stage.model.head(torch.randn(2, 16)).dtype)
        return loss

    monkeypatch.setattr(FineTuning, "loss", watched)
    status, _, err = run(*WORDS, "--precision", "bf16-mixed")
    assert (status, err) == (0, ""), err
    assert seen == {torch.bfloat16} and {value.dtype for value in state().values()} == {torch.float32}
    assert "mixed precision (bfloat16)" in Path("out/README.md").read_text()
    assert json.loads(Path("out/results.json").read_text())["settings"]["precision"] == "bf16-mixed"


def test_lora_from_the_command_line(run, place):
    """Nothing outside of the mixers changes in fine-tuning; the result is a plain model of the same size."""
    status, out, err = run(*WORDS, "--lora", "4")
    assert (status, err) == (0, ""), err
    assert "a term of rank 4 for every matrix" in out and "LoRA, merged afterwards" in Path("out/README.md").read_text()
    scope = {}
    exec(MINE, scope)
    before, after = scope["vit"]().state_dict(), state()
    outside = [name for name in after if ".mixer." not in name]
    assert outside and all(torch.equal(after[name], before[name]) for name in outside)
    assert not any("parametrizations" in name for name in after)
