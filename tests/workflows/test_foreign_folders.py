"""A folder from a stranger runs no code and reaches no network, whatever is on standard input."""

import ast
import io
import json
import socket
from pathlib import Path

import pytest
import torch

import polymix
from polymix.errors import PolymixError

pytest.importorskip("transformers", reason="untested: folders of strangers' models of transformers")

import transformers

from polymix.domains.text.tokenizer import load_tokenizer
from polymix.workflows.convert.sources import load_model
from polymix.workflows.generate.folder import load

PACKAGE = Path(polymix.__file__).parent


def test_every_from_pretrained_says_whether_foreign_code_may_run():
    """transformers asks on standard input where nothing is said, and runs the code if a line with "y" is there."""
    for path in PACKAGE.rglob("*.py"):
        text = path.read_text("utf-8")
        for node in ast.walk(ast.parse(text if "from_pretrained" in text else "")):
            if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained":
                assert "trust_remote_code" in {word.arg for word in node.keywords}, f"{path}:{node.lineno}"


def refusal(read, folder):
    """The message of a refusal, "" where the folder is read."""
    try:
        read(str(folder))
    except PolymixError as error:
        return str(error)
    return ""


@pytest.fixture
def stranger(tmp_path, monkeypatch):
    """A model's folder whose config, tokenizer and auto_map name code that leaves a mark; "y" waits on standard input."""
    folder, mark = tmp_path / "model", tmp_path / "mark"
    config = transformers.GPT2Config(n_embd=8, n_layer=1, n_head=2, vocab_size=16, n_positions=8)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    (folder / "theirs.py").write_text(f"open({str(mark)!r}, 'w').close()\nfrom transformers import *\n"
                                      "class Config(GPT2Config): pass\nclass Model(GPT2LMHeadModel): pass\n"
                                      "class Tokenizer(PreTrainedTokenizerFast): pass\n")  # fmt: skip
    content = json.loads((folder / "config.json").read_text())
    auto = {"AutoConfig": "theirs.Config", "AutoModel": "theirs.Model", "AutoModelForCausalLM": "theirs.Model",
            "AutoTokenizer": ["theirs.Tokenizer", "theirs.Tokenizer"]}  # fmt: skip
    (folder / "config.json").write_text(json.dumps({**content, "auto_map": auto}))
    kind = {"tokenizer_class": "Tokenizer", "auto_map": {"AutoTokenizer": ["theirs.Tokenizer", "theirs.Tokenizer"]}}
    (folder / "tokenizer_config.json").write_text(json.dumps(kind))
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 20))
    return folder, mark


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("read", [load_model, load, load_tokenizer], ids=["convert", "generate", "train"])
@pytest.mark.parametrize("own_type", [True, False])
def test_no_verb_runs_their_code(stranger, read, trained, own_type):
    folder, mark = stranger
    if not trained:
        (folder / "model.safetensors").unlink()
    if own_type:  # a model_type that only their code knows
        content = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**content, "model_type": "theirs"}))
    assert "\n" not in refusal(read, folder)
    assert not mark.exists(), "code of the folder ran"


@pytest.fixture
def no_network(monkeypatch):
    """Every attempt to reach another machine is recorded, and fails."""
    tried = []

    def refuse(*args, **kwargs):
        tried.append(args)
        raise OSError("no network in this test")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    return tried


@pytest.mark.parametrize("trained", [True, False])
@pytest.mark.parametrize("named", [{"backbone": "resnet18", "use_timm_backbone": True}, {"backbone": "microsoft/resnet-50"}],
                         ids=["timm", "hub"])  # fmt: skip
def test_a_named_backbone_is_not_downloaded(tmp_path, no_network, named, trained):
    """With the network at hand transformers tried for up to 24 seconds."""
    backbone = transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 8], depths=[1, 1], num_labels=2, out_features=["stage2"]
    )
    config = transformers.DetrConfig(
        d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2, decoder_attention_heads=2,
        encoder_ffn_dim=16, decoder_ffn_dim=16, num_queries=4, use_timm_backbone=False, backbone=None,
        use_pretrained_backbone=False, backbone_config=backbone,
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.DetrForObjectDetection(config).save_pretrained(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    content.pop("backbone_config")
    (tmp_path / "config.json").write_text(json.dumps({**content, **named, "use_pretrained_backbone": True}))
    if not trained:
        (tmp_path / "model.safetensors").unlink()
    assert "\n" not in refusal(load_model, tmp_path)
    assert not no_network
