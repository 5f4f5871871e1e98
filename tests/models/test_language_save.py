"""What `save_pretrained` writes and the Auto classes load, here and in a process that starts with nothing."""

import copy
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from polymix.models.language.layers import CausalLayer, mixers_of
from tests.helpers import slow_but
from tests.models.test_language_generate import tokenizer
from tests.models.tiny import IDS, MIXERS, SHAPES, VOCAB, error, fresh, tiny, transformers

Auto = transformers.AutoModelForCausalLM


def buffers(model):
    """Those that no file holds."""
    weights = model.state_dict()
    return {name: value for name, value in model.named_buffers() if name not in weights}


@pytest.mark.parametrize("name", slow_but(("pom", "padre-2", "qt", "softmax", "pom-local"), MIXERS))
def test_a_saved_model_comes_back_whole(name, tmp_path):
    for shape in SHAPES:
        model = copy.deepcopy(tiny(name, shape))
        model.save_pretrained(tmp_path)
        back = Auto.from_pretrained(tmp_path)
        assert type(back) is type(model) and not back.training
        assert torch.equal(back(IDS).logits, model(IDS).logits)
        assert [m.config for m in mixers_of(back)] == [m.config for m in mixers_of(model)]
        for where, value in buffers(model).items():
            assert torch.equal(buffers(back)[where], value), f"{where} is not what it was"
        base = transformers.AutoModel.from_pretrained(tmp_path)
        assert torch.equal(base(IDS).last_hidden_state, model.model(IDS).last_hidden_state)


@pytest.mark.parametrize("name", ["performer", "mamba", "hyena", "pom-local"])
def test_a_model_is_loaded_in_pieces_and_in_bf16(name, tmp_path):
    model = copy.deepcopy(tiny(name, "llama"))
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    assert torch.equal(Auto.from_pretrained(tmp_path)(IDS).logits, model(IDS).logits)
    low = Auto.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {p.dtype for p in low.parameters()} == {torch.bfloat16}
    assert error(low(IDS).logits, model(IDS).logits) < 0.1
    assert low.generate(IDS, max_new_tokens=3).shape == (3, 15)


def test_half_precision_stays_on_the_disk(tmp_path):
    copy.deepcopy(tiny("pom-local")).bfloat16().save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    assert {p.dtype for p in Auto.from_pretrained(tmp_path).parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("name", ["pom", "padre-3", "mamba", "performer", "hyena", "local", "softmax"])
def test_what_a_file_lacks_is_made_as_in_a_fresh_model(name, tmp_path):
    torch.manual_seed(0)
    model = fresh(MIXERS[name], "gpt-none", num_layers=1)
    model.save_pretrained(tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    for lost in [where for where in weights if name == "pom" or ".mix." in where]:
        rest = {where: weight for where, weight in weights.items() if where != lost}
        save_file(rest, tmp_path / "model.safetensors", {"format": "pt"})
        back, told = Auto.from_pretrained(tmp_path, output_loading_info=True)
        assert told["missing_keys"] - {"lm_head.weight"} == {lost}
        got, expected = back.state_dict()[lost].double(), weights[lost].double()
        if expected.numel() > 1 and expected.std() < 1e-3:
            torch.testing.assert_close(got, expected, msg=f"{lost} has no init of its own")
        spread, off = expected.std(correction=0), (got.mean() - expected.mean()).abs()
        assert got.isfinite().all() and off <= 2 * spread + 1e-3, f"{lost} has no init of its own"
        assert spread / 2 - 1e-3 <= got.std(correction=0) <= 2 * spread + 1e-3, f"{lost} has no init of its own"
        kept = {where: p for where, p in back.state_dict().items() if where in rest}
        assert all(torch.equal(p, weights[where]) for where, p in kept.items()), "what was there was changed"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_stay_tied_and_others_apart(tied, tmp_path):
    model = fresh("pom", tie_word_embeddings=tied)
    model.save_pretrained(tmp_path)
    back = Auto.from_pretrained(tmp_path)
    assert (back.lm_head.weight is back.model.embed.weight) == tied
    assert torch.equal(back(IDS).logits, model(IDS).logits)
    with torch.no_grad():
        back.model.embed.weight += 1
    assert torch.equal(back.lm_head.weight, back.model.embed.weight) == tied


@pytest.mark.parametrize("tied", [True, False])
def test_the_vocabulary_grows_and_shrinks(tied, tmp_path):
    model = fresh("pom", tie_word_embeddings=tied)
    before = model(IDS).logits
    model.resize_token_embeddings(VOCAB + 6, mean_resizing=False)
    after = model(IDS).logits
    assert after.shape[-1] == VOCAB + 6 and error(after[..., :VOCAB], before) <= 1e-6
    model.save_pretrained(tmp_path)
    assert torch.equal(Auto.from_pretrained(tmp_path)(IDS).logits, after)
    model.resize_token_embeddings(VOCAB - 5)
    assert model(IDS.clamp_max(VOCAB - 6)).logits.shape[-1] == model.config.vocab_size == VOCAB - 5


def test_a_folder_says_the_mixers_that_the_layers_have_now(tmp_path):
    model = fresh(["pom", "local:window=4"])
    model.model.blocks[0].mix = CausalLayer(mixers_of(tiny("qt"))[0].config, 16, 0)
    model.eval().save_pretrained(tmp_path)
    back = Auto.from_pretrained(tmp_path)
    assert [m.name for m in mixers_of(back)] == ["qt", "local"]
    assert torch.equal(back(IDS).logits, model(IDS).logits)


# -- a fresh process


def python(code, home):
    """Run code where nothing is imported yet and no download is possible; what it printed last."""
    root = Path(__file__).parents[2]
    env = {**os.environ, "HF_HOME": str(home), "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.strip().splitlines()[-1]


@pytest.mark.slow  # two interpreters that import everything
@pytest.mark.parametrize(
    ("start", "trust"),
    [
        ("import polymix.models.language", False),
        ("from polymix.compat import cure_torchvision; cure_torchvision()", True),
    ],
)
def test_a_fresh_process_loads_and_generates(start, trust, tmp_path):
    answers = {}
    for shape in ("gpt", "llama"):
        model = copy.deepcopy(tiny("pom-local", shape))
        model.save_pretrained(tmp_path / shape)
        tokenizer().save_pretrained(tmp_path / shape)
        new = model.generate(IDS[:1, :4], max_new_tokens=5, do_sample=False)[0, 4:]
        answers[shape] = [model.config.model_type, model(IDS[:1]).logits.sum().item(), new.tolist()]
    code = f"""
    {start}
    import json, sys, torch, transformers
    sys.path = [place for place in sys.path if place]
    found, more = {{}}, {{"trust_remote_code": {trust}}}
    for shape in ("gpt", "llama"):
        folder = {str(tmp_path)!r} + "/" + shape
        config = transformers.AutoConfig.from_pretrained(folder, **more)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, **more)
        base = transformers.AutoModel.from_pretrained(folder, **more)
        ids = torch.tensor({IDS[:1].tolist()})
        assert torch.equal(base(ids).last_hidden_state, model.model(ids).last_hidden_state)
        pipe = transformers.pipeline("text-generation", folder, device="cpu", **more)
        prompt = " ".join(f"w{{i}}" for i in ids[0, :4].tolist())
        (said,) = pipe(prompt, max_new_tokens=5, do_sample=False, return_full_text=False)
        words = [int(word[1:]) for word in said["generated_text"].split()]
        found[shape] = [config.model_type, model(ids).logits.sum().item(), words]
    print(json.dumps(found))
    """
    said = json.loads(python(code, tmp_path / "home"))
    for shape, (kind, total, new) in answers.items():
        assert said[shape][0] == kind and said[shape][2] == new
        assert said[shape][1] == pytest.approx(total, rel=1e-5, abs=1e-4)
