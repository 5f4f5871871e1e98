"""What attention has and a mixer does not, and models that cannot be converted: named, and before anything is changed."""

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import CapabilityError, MaskError, OptionError, PolymixError
from tests.convert.checks import refuses
from tests.convert.test_families import GROUPED, IDS, SMALL, known, language, logits

MPT = {"d_model": 32, "n_heads": 4, "n_layers": 2, "vocab_size": 64}
GEMMA = {**GROUPED, "layer_types": ["full_attention"] * 2, "query_pre_attn_scalar": 8}
SINKS = {**GROUPED, "layer_types": ["full_attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1,
         "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}  # fmt: skip
T5 = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4, "vocab_size": 64}
NAMED = [("gemma2", GEMMA, "soft_cap"), ("gpt_oss", SINKS, "sinks")]


@pytest.mark.parametrize(("kind", "options", "part"), NAMED)
@pytest.mark.parametrize("mixer", ["pom", "softmax"])
def test_what_acts_on_logits_is_lost_by_name_alone(kind, options, part, mixer):
    model = language(kind, **options)
    before = logits(model)
    error = refuses(model, mixer, OptionError, part)
    assert f"--drop {part}" in error.cure
    assert torch.equal(logits(model), before)
    report = polymix.convert(model, mixer, drop=(part,))
    assert all(part in layer.dropped for layer in report.layers) and logits(model).isfinite().all()


def test_biases_in_a_mask_cannot_be_told_from_it():
    refuses(language("falcon", alibi=True), "pom", MaskError, "A mixer has no logits")


@pytest.mark.parametrize("mixer", ["pom", "softmax", "qt"])
def test_a_mask_whose_true_hides_is_not_read_as_one_whose_true_shows(mixer):
    """MPT's: converted, it would see the future and padding alone."""
    for drop in ((), ("position_bias",)):
        refuses(language("mpt", **MPT), mixer, MaskError, "no token sees itself", drop=drop)


def test_relative_biases_of_an_encoder_and_its_decoder():
    import transformers

    known("t5")
    torch.manual_seed(0)
    model = transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, decoder_start_token_id=0)).eval()
    refuses(model, "pom", OptionError, "position_bias")
    polymix.convert(model, "pom", drop=("position_bias",))
    assert model(input_ids=IDS, decoder_input_ids=IDS).logits.isfinite().all()


def test_scaled_angles_are_lost_by_name():
    """A mixer that never turns queries and keys loses no more by scaled angles than by plain ones."""
    scaled = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    model = language("llama", **GROUPED, **scaled)
    polymix.convert(model, "pom", copy=True)
    refuses(model, "local", OptionError, "'rotary'")
    polymix.convert(model, "local", drop=("rotary",))
    model = language("qwen3", **GROUPED, **scaled)
    polymix.convert(model, "pom", copy=True)
    refuses(model, "local", OptionError, "'rotary'", init="fresh")
    before = logits(model)
    polymix.convert(model, "local")  # the layer turns queries and keys itself
    assert torch.allclose(logits(model, use_cache=False), before, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("drop", ["position_bias", ("bias",), (3,), 3])
def test_only_parts_are_dropped(drop):
    refuses(language("qwen3"), "pom", OptionError, "`drop`", drop=drop)


def test_a_part_that_no_layer_has_is_a_mistake():
    refuses(language("qwen3"), "pom", OptionError, "which no converted layer has", drop=("sinks",))


# -- weights that are not numbers here


class Linear4bit(nn.Linear):
    """Stands for the layer of bitsandbytes of this name: two weights a byte."""

    def __init__(self, layer):
        super().__init__(layer.in_features, layer.out_features, bias=layer.bias is not None)
        self.weight = nn.Parameter(torch.zeros(layer.weight.numel() // 2, 1, dtype=torch.uint8), requires_grad=False)


class GGUFParameter(nn.Parameter):
    """Stands for the parameter of diffusers of this name."""


Linear4bit.__module__, GGUFParameter.__module__ = "bitsandbytes.nn.modules", "diffusers.quantizers.gguf.utils"


def codes(layer):
    layer.weight = nn.Parameter(layer.weight.to(torch.int8), requires_grad=False)
    return layer


def gguf(layer):
    layer.weight = GGUFParameter(layer.weight.data)
    return layer


@pytest.mark.parametrize(("quantise", "named"), [(Linear4bit, "Linear4bit"), (codes, "int8"), (gguf, "GGUFParameter")])
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_quantised_weights(kind, quantise, named):
    model = language(kind, **GROUPED)
    attention = model.model.layers[0].self_attn
    attention.v_proj = quantise(attention.v_proj)
    error = refuses(model, "pom", CapabilityError, f"quantised .*{named}")
    assert "dequantize" in error.cure
    if kind == "llama":  # which is read without a call
        polymix.convert(model, {"*.1.*": "pom"})


def test_weights_on_meta():
    """A layer that is read from a call needs weights; another one gets a mixer on meta."""
    with pytest.raises(CapabilityError, match="on meta"):
        polymix.convert(language("qwen3", **GROUPED).to("meta"), "pom")
    model = language("llama", **GROUPED).to("meta")
    polymix.convert(model, "pom")
    assert all(parameter.is_meta for parameter in model.parameters())


def test_a_family_may_be_named_as_a_way_of_quantising():
    model = language("bitnet", **GROUPED)
    assert [layer.now for layer in polymix.convert(model, "pom").layers] == ["pom"] * 2


@pytest.mark.slow
@pytest.mark.parametrize("whole", [True, False])
def test_compiled_models_convert_as_they_are(whole):
    """The compiled graph of the attention is not used for the mixer."""
    model, plain = language("qwen3"), language("qwen3")
    compiled = torch.compile(model, backend="eager") if whole else model
    if not whole:
        model.compile(backend="eager")
    before = logits(compiled)
    torch.manual_seed(0)
    report = polymix.convert(compiled, "pom", context=80)
    torch.manual_seed(0)
    polymix.convert(plain, "pom", context=80)
    torch.testing.assert_close(logits(compiled), logits(plain))
    report.undo()
    assert torch.equal(logits(compiled), before)


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_flash_attention_set_by_hand(kind):
    """A host that cannot run is no reason where a layer is read without a call; else the host's own words are."""
    model = language(kind, **GROUPED)
    model.config._attn_implementation = "flash_attention_2"
    if kind == "qwen3":
        refuses(model, "pom", OptionError, "on a small example, .* fails with")
        return
    polymix.convert(model, "pom")
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("kind", ["gpt2", "llama", "qwen3"])
def test_attention_weights_are_not_left_out_in_silence(kind):
    """GPT-2 would return those of the kept layer alone, as if they were the first's."""
    options = GROUPED if kind != "gpt2" else {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}
    model = language(kind, **options, attn_implementation="eager")
    polymix.convert(model, {"*.0.*": "pom"})
    with pytest.raises(PolymixError, match="output_attentions"):
        model(IDS, output_attentions=True)
    model.config.output_attentions = True
    with pytest.raises(PolymixError, match="output_attentions"):
        model(IDS)


def test_a_static_cache():
    model = language("qwen3")
    polymix.convert(model, "pom")
    with pytest.raises(CapabilityError, match="Leave cache_implementation out"):
        model.generate(IDS[:1], max_new_tokens=2, cache_implementation="static", do_sample=False)


# -- layers that are not alone

LATENT = {
    "num_key_value_heads": 4, "q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8,
    "v_head_dim": 8, "n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "first_k_dense_replace": 1, "moe_intermediate_size": 16,
}  # fmt: skip
SHARING = {
    "num_hidden_layers": 4, "layer_types": ["full_attention"] * 4, "num_kv_shared_layers": 2,
    "hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": 64, "laurel_rank": 4, "altup_num_inputs": 2,
    "activation_sparsity_pattern": [0.0] * 4,
}  # fmt: skip


def generates_alike(model):
    one, two = (model.generate(IDS[:1], use_cache=use, max_new_tokens=4, do_sample=False) for use in (True, False))
    return torch.equal(one, two)


@pytest.mark.parametrize("kind", ["deepseek_v2", "deepseek_v3"])
def test_latent_attention(kind):
    model = language(kind, **{**SMALL, **LATENT})
    before = logits(model)
    for mixer in ("softmax", "pom", "qt"):  # softmax by the layer's own keys and values, of other widths
        report = polymix.convert(model, mixer)
        assert mixer == "softmax" or generates_alike(model)
        assert mixer != "softmax" or torch.allclose(logits(model, use_cache=False), before, rtol=1e-4, atol=1e-5)
        report.undo()
    assert torch.equal(logits(model), before)


def test_layers_that_share_keys_and_values_are_kept():
    model = language("gemma3n_text", **{**GROUPED, **SHARING})
    report = polymix.convert(model, "pom")
    assert [layer.now for layer in report.layers] == ["pom", None, None, None] and generates_alike(model)
    report.undo()
    for number in (1, 3):
        refuses(model, {f"model.layers.{number}.*": "pom"}, CapabilityError, "several layers share")


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_one_layer_in_two_places_of_one_cache(kind):
    model = language(kind, **GROUPED)
    model.model.layers[1].self_attn = model.model.layers[0].self_attn
    refuses(model, "pom", CapabilityError, r"layers\.1\.self_attn too, with one place in the cache")
