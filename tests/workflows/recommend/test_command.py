"""`polymix recommend` and the name `polymix.recommend`: thin, and loaded when they are asked for."""

import json

import pytest

import polymix
from polymix.cli import main
from polymix.compat import cure_torchvision
from polymix.workflows.recommend import recommend
from tests.workflows.convert.test_command_language import model_of

TINY = ("--mixers", "pom,poly_nl", "--seconds", "0.3", "--threads", "1")
MODEL = """
import torch
from torch import nn

class Host(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
    def forward(self, x):
        return self.attention(x, x, x)[0]

def host():
    return Host(), torch.randn(1, 9, 8)

def without_input():
    return Host()

def number():
    return 3

def broken():
    raise RuntimeError("no such thing")
"""


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "mine.py"
    path.write_text(MODEL)
    return path


def run(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main(["recommend", *map(str, arguments)])
    out, err = capsys.readouterr()
    return stop.value.code, out, err


def test_the_package_has_it_by_name():
    assert polymix.recommend is recommend
    with pytest.raises(AttributeError, match="recomend"):
        _ = polymix.recomend


def test_shapes(capsys, tmp_path):
    out = tmp_path / "folder" / "answer.json"
    status, text, err = run(capsys, "--shape", "16x8:heads=2:causal=true", "--shape", "2x9x8", *TINY, "--out", out)
    assert (status, err) == (0, "")
    content = json.loads(out.read_text())
    assert content["headline"] in " ".join(text.split())
    assert [layer["shape"]["tokens"] for layer in content["layers"]] == [16, 9]
    assert "causal" in content["layers"][0]["candidates"][1]["reason"], "what poly_nl cannot do"
    assert "accuracy" in text
    assert max(map(len, text.splitlines())) <= 96


def test_a_function_of_a_file(capsys, file):
    status, text, err = run(capsys, "--model", f"{file}:host", *TINY)
    assert (status, err) == (0, "")
    assert "1 × MultiheadAttention: attention" in text and "Whole model" in text


def test_what_convert_takes(capsys, tmp_path, no_progress_bars):
    """A model by name, and one in a folder, with sizes of their input; one JSON on standard output."""
    cure_torchvision()
    pytest.importorskip("timm", reason="untested: models of timm, which is not installed")
    pytest.importorskip("transformers", reason="untested: models of transformers")
    model_of("gpt2").save_pretrained(tmp_path / "gpt")
    capsys.readouterr()
    named = ("timm/test_vit.r160_in1k", "--image-size", "64", "--batch", "2")
    for words, tokens in ((named, 17), ((tmp_path / "gpt", "--tokens", "12"), 12)):
        status, out, err = run(capsys, "--model", *words, *TINY, "--json")
        assert (status, err) == (0, "")
        assert json.loads(out)["layers"][0]["shape"]["tokens"] == tokens


@pytest.mark.parametrize(("arguments", "named"), [
    ([], "--shape"), (["--shape", "16"], "--shape"), (["--shape", "16x8", "--model", "a.py:b"], "--shape"),
    (["--shape", "16x8:head=2"], "heads"), (["--shape", "16x8", "--mixers", "pomm"], "pom"), (["--shape", "16x8", "--dtype", "int4"], "dtype"),
    (["--shape", "16x8", "--device", "cuda:99"], "device"), (["--shape", "16x8", "--seconds", "0"], "seconds"),
    (["--model", "{file}:number"], "--model"), (["--model", "{file}:without_input"], "input"), (["--model", "{file}:broken"], "no such thing"),
    (["--model", "/nowhere.py:f"], "/nowhere.py"), (["--shape", "16x8", "--tokens", "4"], "--tokens"),
    (["--model", "{file}:host", "--image-size", "8"], "--image-size"), (["--model", "timm/no_such_vit"], "--model"),
])  # fmt: skip
def test_errors_are_one_line_and_status_2(capsys, file, arguments, named):
    status, out, err = run(capsys, *(word.format(file=file) for word in arguments))
    assert (status, out) == (2, "")
    assert len(err.splitlines()) == 1
    assert named in err
