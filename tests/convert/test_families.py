"""Families of transformers that have no adapter of their own: read by names, proven by a call."""

from pathlib import Path

import pytest
import torch

import polymix
from polymix import errors
from polymix.compat import cure_torchvision
from polymix.convert.adapters.transformers.families import limited
from tests.contracts.library_cases import whisper_config

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: families of transformers")

SMALL = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48, "vocab_size": 64,
    "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GROUPED = {**SMALL, "num_key_value_heads": 2, "head_dim": 8}
LANGUAGE = {
    "qwen3": GROUPED, "phi3": {**SMALL, "num_key_value_heads": 2}, "gpt_neox": SMALL, "opt": {**SMALL, "ffn_dim": 48},
    "falcon": {**SMALL, "num_kv_heads": 2, "new_decoder_architecture": True},
    "mistral": {**GROUPED, "sliding_window": None}, "olmo2": GROUPED,
}  # fmt: skip
ENCODERS = {
    "modernbert": {**SMALL, "layer_types": ["full_attention"] * 2}, "distilbert": {"dim": 32, "n_layers": 2, "n_heads": 4,
    "hidden_dim": 48, "vocab_size": 64}, "albert": {**SMALL, "embedding_size": 16}, "deberta-v2": SMALL,
}  # fmt: skip
IDS = torch.tensor([[5, 6, 4, 3, 9, 7], [1, 2, 3, 6, 8, 5]])


def known(kind):
    """Skips where this transformers lacks a family."""
    if kind not in transformers.models.auto.configuration_auto.CONFIG_MAPPING:
        pytest.skip(f"untested: {kind}, which this transformers lacks")


def language(kind, **options):
    known(kind)
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(kind, **{**LANGUAGE.get(kind, {}), **options})
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def encoder(kind):
    known(kind)
    torch.manual_seed(0)
    return transformers.AutoModel.from_config(transformers.AutoConfig.for_model(kind, **ENCODERS[kind])).eval()


def logits(model, ids=IDS, **options):
    with torch.no_grad():
        return model(ids, **options)[0]


@pytest.mark.parametrize("kind", LANGUAGE)
def test_a_language_model_generates_saves_and_comes_back(kind, tmp_path):
    """One state a layer in the cache; padding on the left changes nothing."""
    model = language(kind)
    before = logits(model)
    report = polymix.convert(model, "pom")
    assert [layer.now for layer in report.layers] == ["pom"] * 2
    assert all(layer.inherited["proj.weight"] for layer in report.layers), "W_o was not taken over"
    assert all("poly.weight" in layer.inherited for layer in report.layers), "W_v was not proven"
    ids, options = IDS[:1], {"max_new_tokens": 4, "do_sample": False}
    one, two = (model.generate(ids, use_cache=use, **options) for use in (True, False))
    assert torch.equal(one, two), "the cache changes what is generated"
    padded, mask = torch.cat((torch.zeros_like(ids[:, :2]), ids), 1), torch.ones(1, 8, dtype=torch.long)
    mask[:, :2] = 0
    assert torch.equal(model.generate(padded, attention_mask=mask, **options)[:, 2:], one), "padding is read"
    polymix.save_pretrained(model, tmp_path)
    assert torch.equal(logits(polymix.load_pretrained(tmp_path)), logits(model))
    report.undo()
    assert torch.equal(logits(model), before)


@pytest.mark.parametrize("mixer", ["padre", "qt", "linear", "mamba"])
def test_any_causal_mixer_sees_the_past_alone(mixer):
    """Grouped keys and norms of queries and keys are no obstacle. The flag is not read: the call is."""
    model = language("qwen3")
    polymix.convert(model, mixer)
    other = IDS.clone()
    other[:, -1] = 11
    torch.testing.assert_close(logits(model)[:, :-1], logits(model, other)[:, :-1])


@pytest.mark.parametrize("kind", ENCODERS)
def test_an_encoder_sees_both_sides_but_no_padding(kind):
    model = encoder(kind)
    polymix.convert(model, "pom")
    other, mask = IDS.clone(), torch.ones_like(IDS)
    other[:, -1], mask[:, -1] = 11, 0
    assert not torch.allclose(logits(model)[:, 0], logits(model, other)[:, 0]), "later tokens are not seen"
    torch.testing.assert_close(
        logits(model, attention_mask=mask)[:, :-1], logits(model, other, attention_mask=mask)[:, :-1]
    )


@pytest.mark.parametrize(("kind", "exact"), [("mistral", True), ("phi3", True), ("qwen3", True), ("mpt", False)])
def test_softmax_is_the_layer_itself_or_is_refused(kind, exact):
    """Rotary angles and norms of queries and keys (Qwen 3) are kept; MPT's masks are not read, and nothing is changed."""
    model = language(
        kind, **({} if kind in LANGUAGE else {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64})
    )
    before = logits(model)
    if exact:
        polymix.convert(model, "softmax")
        torch.testing.assert_close(logits(model, use_cache=False), before, rtol=1e-4, atol=1e-5)
        return
    with pytest.raises(errors.MaskError, match="no token sees itself"):
        polymix.convert(model, "softmax")
    assert torch.equal(logits(model), before)


def test_a_layer_that_adds_its_input_is_refused():
    with pytest.raises(errors.CapabilityError, match="residual"):
        polymix.convert(language("bloom", hidden_size=32, n_layer=2, n_head=4, vocab_size=64), "pom")


def test_a_layer_that_sees_a_window_alone_is_refused():
    model = language("mistral", sliding_window=16)
    assert [limited(part) for name, part in model.named_modules() if name.endswith("self_attn")] == [
        "a window of 16 tokens"
    ] * 2
    with pytest.raises(errors.CapabilityError, match="window of 16 tokens"):
        polymix.convert(model, "pom")


@pytest.mark.slow
def test_a_layer_with_a_state_is_kept_beside_mixers(monkeypatch):
    """Kimi Linear's delta attention keeps its state elsewhere: a mixer there would forget the past, without a word."""
    known("kimi_linear")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")
    import families

    model = families.built("kimi_linear")
    report = polymix.convert(model, "pom")
    assert [(layer.was, layer.now) for layer in report.layers] == [
        ("KimiLinearDeltaAttention", None), ("KimiLinearAttention", "pom"),
    ]  # fmt: skip
    one, two = (model.generate(IDS[:1], use_cache=use, max_new_tokens=4, do_sample=False) for use in (True, False))
    assert torch.equal(one, two), "a mixer forgets the past"
    with pytest.raises(errors.CapabilityError, match="a state of its own"):
        polymix.convert(families.built("kimi_linear"), {"*.0.self_attn": "pom"})


def test_layers_with_windows_are_kept_beside_mixers():
    known("gemma2")
    options = {**GROUPED, "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 4}
    model = language("gemma2", **options)
    report = polymix.convert(model, "pom", drop=("soft_cap",))
    assert [layer.now for layer in report.layers] == [None, "pom"]
    one, two = (model.generate(IDS[:1], use_cache=use, max_new_tokens=4, do_sample=False) for use in (True, False))
    assert torch.equal(one, two), "keys of a window and a state do not share a cache"


def test_an_encoder_and_a_decoder_with_layers_that_only_some_calls_reach():
    """Whisper's cross-attention is converted with its own context; a decoder alone never calls it, and keeps it."""
    known("whisper")
    config = whisper_config()
    model = transformers.WhisperForConditionalGeneration(config).eval()
    report = polymix.convert(model, "pom")
    assert len(report.adapters) == 3 and sum(adapter.cross for adapter in report.adapters.values()) == 1
    sound = torch.randn(1, 16, 40)
    one, two = (model.generate(sound, use_cache=use, max_new_tokens=4, do_sample=False) for use in (True, False))
    assert torch.equal(one, two)
    alone = polymix.convert(transformers.WhisperForCausalLM(config).eval(), "pom")
    assert [layer.now for layer in alone.layers] == ["pom", None]


@pytest.mark.parametrize("mixer", ["pom", "qt", "softmax"])
def test_values_in_a_list_come_back_in_a_list(mixer):
    """openai-gpt adds lists: to a tuple, or to a tensor by itself, its blocks could add nothing."""
    model = language("openai-gpt", n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=32)
    layer, x = model.transformer.h[0].attn, torch.randn(2, 6, 32)
    before, expected = layer(x), logits(model)
    polymix.convert(model, mixer)
    after = model.transformer.h[0].attn(x)
    assert type(after) is type(before) is list and len(after) == len(before)
    assert mixer != "softmax" or torch.allclose(logits(model), expected, atol=1e-5)
    assert model.generate(IDS, max_new_tokens=2, do_sample=False).shape == (2, 8)
    with pytest.raises(errors.OptionError, match="output_attentions"):
        model(IDS, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(errors.OptionError, match="output_attentions"):
        model(IDS)
