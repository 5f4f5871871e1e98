"""`polymix convert --data self`: language models that are distilled without any text."""

import json
from pathlib import Path

import pytest
import torch

from polymix.compat import cure_torchvision
from polymix.workflows.convert import drawn

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: models of transformers")
WORDS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcdefghijklmnopqrstuvwxyz")
SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}


@pytest.fixture
def place(tmp_path, monkeypatch):
    """Folders of a masked and a causal model, whose predictions are far from uniform, and of one without a head."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(drawn, "HELD_BACK", 2)
    torch.manual_seed(0)
    config = transformers.BertConfig(vocab_size=len(WORDS), max_position_embeddings=32, **SIZES)
    ends = {"bos_token_id": None, "eos_token_id": None}
    hosts = {
        "masked": transformers.BertForMaskedLM(config), "plain": transformers.BertModel(config),
        "causal": transformers.GPT2LMHeadModel(
            transformers.GPT2Config(vocab_size=12, n_positions=16, n_embd=16, n_layer=1, n_head=2, **ends)
        ),
    }  # fmt: skip
    for name, model in hosts.items():
        for weight in model.parameters():
            if weight.ndim > 1:
                torch.nn.init.normal_(weight, std=0.5)
        model.save_pretrained(name)
    Path("vocab.txt").write_text("\n".join(WORDS) + "\n")
    transformers.BertTokenizer("vocab.txt").save_pretrained("masked")
    return tmp_path


TRAIN = ("--distill-epochs", "1", "--samples", "64", "--seconds", "0.1")


@pytest.mark.parametrize(("model", "task"), [("masked", "fill-mask"), ("causal", "text-generation")])
def test_a_language_model_is_distilled_on_what_it_draws(run, model, task):
    status, out, err = run("--model", model, "--plan", "pom", "--data", "self", *TRAIN)
    assert (status, err) == (0, "") and "64 texts that the model draws itself" in out and "no text was used" in out
    content = json.loads(Path("out/results.json").read_text())
    results = content["conversion"]["accuracy"]
    assert set(results) == {"before", "converted", "imitated", "distilled"}
    if model == "causal":  # few tokens of the other are masked
        assert results["before"] < results["distilled"] < results["converted"]
    assert content["data"] == {"name": "self", "train": 64, "tokens": [4, 32 if model == "masked" else 16]}
    assert f'pipeline_tag: "{task}"' in Path("out/README.md").read_text()
    assert not Path("out/checkpoints").exists()


def test_random_tokens_are_said_to_be_random(run):
    status, out, _ = run("--model", "causal", "--plan", "pom", "--data", "random", *TRAIN)
    assert status == 0 and "64 texts of random tokens" in out


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--model", "plain", "--data", "self"), "BertModel, which has no head"),
        (("--model", "plain", "--data", "random"), "BertModel, which has no head"),
        (("--model", "timm/vit_tiny_patch16_224", "--data", "self"), "'self' for VisionTransformer"),
        (("--model", "causal", "--data", "self", "--tokens", "17"), "--tokens"),
        (("--model", "causal", "--data", "self", "--image-size", "32"), "--image-size"),
        (("--model", "causal", "--data", "self", "--samples", "0"), "--samples"),
        (("--model", "causal", "--samples", "8"), "--data self"),
        (("--model", "causal", "--data", "self", "--distill-epochs", "1", "--from-scratch"), "only the original"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(fails, options, named):
    fails(*options, named=named)


def test_a_masked_model_without_its_tokenizer_is_refused(fails):
    for path in Path("masked").glob("*token*"):
        path.unlink()
    fails("--model", "masked", "--data", "self", named="mask")


def test_text_for_a_masked_model_names_the_way_out(fails):
    Path("some.txt").write_text("words " * 100)
    fails("--model", "masked", "--data", "some.txt", named="--data self")
