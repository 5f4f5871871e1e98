"""`polymix convert`: options of `polymix.convert` reach the saved model, or are refused before anything is written."""

import json
from pathlib import Path

import pytest

import polymix

HOST = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(32, 4, batch_first=True)

    def forward(self, x, positions):
        return x + self.attention(x + positions, x + positions, x)[0]

def host():
    return Layer(), (torch.randn(2, 9, 32), torch.randn(2, 9, 32))
"""


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("mine.py").write_text(HOST)
    return tmp_path


@pytest.fixture
def mine(run):
    return lambda *options: run("--model", "mine.py:host", *options)


def test_positions_and_a_matched_width_are_saved_and_reported(mine):
    status, _, err = mine("--plan", "pom", "--positions", "drop", "--match", "parameters")
    assert (status, err) == (0, "")
    model = polymix.load_pretrained("out", trust=True)
    assert model.attention.positions == "drop" and 1 < model.attention.mixer.config.expand < 2
    results = json.loads(Path("out/results.json").read_text())
    (layer,) = results["conversion"]["layers"]
    assert layer["positions"] == "drop" and abs(layer["parameters"][1] / layer["parameters"][0] - 1) < 0.05
    assert (results["settings"]["positions"], results["settings"]["match"]) == ("drop", "parameters")


@pytest.mark.parametrize(("options", "words"), [
    (("--plan", "padre"), "expected 'all' or 'drop' or 'values', got None for padre"),
    (("--plan", "se", "--positions", "values"), "values from another input"),
    (("--plan", "pom", "--positions", "none"), "`--positions`: expected None, 'all', 'drop', 'values'"),
    (("--plan", "poly_nl", "--positions", "all", "--match", "parameters"), "a mixer whose width is an option"),
    (("--plan", "pom", "--match", "flops"), "`--match`"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_one_line_and_writes_nothing(mine, options, words):
    status, _, err = mine(*options)
    assert status == 2 and words in err.replace("\n", " ") and "Traceback" not in err
    assert not Path("out").exists()


def test_help_has_an_example(run):
    status, out, _ = run("--help")
    assert status == 0 and "Example: polymix convert --model timm/" in " ".join(out.split())
