"""More tokens than a language model was trained with: `polymix convert --context`."""

import json
from pathlib import Path

import pytest
import torch

from polymix.compat import cure_torchvision

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: language models (the extra text)")
pytest.importorskip("tokenizers", reason="untested: text, for which tokenizers are needed (the extra text)")
import polymix  # noqa: E402
from tests.workflows.convert.test_command_language import loaded, model_of, place, results  # noqa: E402, F401

LONG = ("--context", "48")


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_a_converted_model_takes_more_tokens_than_its_host(run, kind):
    """A host of 32 positions, converted and distilled on windows of 48, reads and continues 48."""
    words = (
        "--model",
        kind,
        "--data",
        "texts",
        "--distill-epochs",
        "1",
        "--batch",
        "8",
        "--plan",
        "1:1",
        "--mixer",
        "pom",
    )
    status, out, err = run(*words, *LONG)
    assert (status, err) == (0, ""), err
    assert results()["data"]["tokens"] == 48
    assert ("transformer.wpe.weight was resized from 32 × 16 to 48 × 16" in out) == (kind == "gpt2")
    model = loaded()
    assert model.config.max_position_embeddings == 48
    assert model(torch.arange(48)[None] % 300).logits.shape == (1, 48, 300)


def test_the_tokenizer_that_is_saved_takes_as_many(run):
    status, _, err = run("--model", "llama", "--plan", "pom", "--positions", "interpolate", "--keep-host", *LONG)
    assert (status, err) == (0, ""), err
    assert json.loads(Path("out/tokenizer_config.json").read_text("utf-8"))["model_max_length"] == 48
    model = polymix.load_pretrained("out")
    assert model.config.rope_parameters["factor"] == 1.5 and model(torch.arange(48)[None]).logits.isfinite().all()


def test_what_cannot_be_extended_is_one_line(run, place):  # noqa: F811
    for words, reason in (
        (("--context", "32"), "more tokens than the model takes"),
        (("--context", "48", "--positions", "continue"), "which has learned positions"),
        (("--context", "48", "--tokens", "64"), "at most the context"), (("--tokens", "48"), "--context 48"),
        (("--context", "48", "--positions", "all"), "--positions"),
    ):  # fmt: skip
        status, _, err = run("--model", "gpt2", "--plan", "pom", *words)
        assert status == 2 and reason in err, "the way out"
