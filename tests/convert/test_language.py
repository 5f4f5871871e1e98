"""GPT-2 and Llama as models of polymix.models.language: the same function, every parameter accounted for."""

import copy

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, OptionError
from tests.helpers import close, jitter

cure_torchvision()
transformers = pytest.importorskip("transformers", reason="untested: language models (the extra text)")
from polymix.workflows.convert.language import repackage  # noqa: E402  # needs transformers

ENDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
IDS = torch.randint(3, 40, (2, 12), generator=torch.Generator().manual_seed(0))
PADDING = torch.ones_like(IDS)
PADDING[0, :5] = 0
PLANS = [None, "pom", "pom:degree=3", "local:window=4", "padre-2", "qt", "mamba", "softmax", "1:1"]


def gpt(**options):
    small = {"vocab_size": 40, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": 32, "resid_pdrop": 0.0}
    config = transformers.GPT2Config(**{**small, "embd_pdrop": 0.0, "attn_pdrop": 0.0, **ENDS, **options})
    return jitter(transformers.GPT2LMHeadModel(config), scale=0.2).eval()


def llama(**options):
    small = {
        "vocab_size": 40, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 32,
    }  # fmt: skip
    return jitter(
        transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**small, **ENDS, **options})), scale=0.2
    ).eval()


HOSTS = {"gpt2": gpt, "llama": llama}


def converted(host, plan):
    if plan is not None:
        polymix.convert(host, plan, mixer="pom", input={"input_ids": IDS})
    return host


@torch.no_grad()
def agree(model, host, tol=1e-5):
    """On plain rows, and on the real tokens of rows with padding on the left."""
    assert not model.training
    close(model(IDS).logits, host(IDS).logits, tol)
    real, places = PADDING.bool(), (PADDING.cumsum(1) - 1).clamp_min(0)
    theirs = host(IDS, attention_mask=PADDING, position_ids=places).logits
    close(model(IDS, attention_mask=PADDING).logits[real], theirs[real], tol)


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("kind", HOSTS)
def test_the_model_computes_what_the_converted_host_does(kind, plan):
    host = converted(HOSTS[kind](), plan)
    model = repackage(host)
    agree(model, host)
    options = {"attention_mask": PADDING, "max_new_tokens": 6, "do_sample": False}
    expected = host.generate(IDS, **options, use_cache=plan != "softmax")  # which has no cache in a host
    assert torch.equal(model.generate(IDS, **options), expected)
    assert model.config.model_type == ("polymix-gpt" if kind == "gpt2" else "polymix-llama")
    assert model.generation_config.pad_token_id == 2


@pytest.mark.parametrize("kind", HOSTS)
def test_attention_that_is_kept_is_the_original_hosts(kind):
    host = HOSTS[kind]()
    original = copy.deepcopy(host)
    names = [layer["name"] for layer in repackage(converted(host, "1:1")).config.mixers]
    assert names == ["pom", "softmax"]
    agree(repackage(original), original)
    assert {layer["name"] for layer in repackage(original).config.mixers} == {"softmax"}
    assert repackage(original).num_parameters() >= original.num_parameters(), "grouped keys are repeated, none is lost"


@pytest.mark.parametrize("kind", HOSTS)
@pytest.mark.parametrize("calibrated", [True, False])
def test_local_attention_inherits_wholly(kind, calibrated):
    """With a window over the whole row it is the host itself; with a shorter one no weight is touched."""
    host = HOSTS[kind]()
    original = copy.deepcopy(host)
    report = polymix.convert(host, "local:window=12", input={"input_ids": IDS} if calibrated else None)
    assert all(not layer.fresh and not layer.dropped and layer.scale is None for layer in report.layers)
    close(host(IDS).logits, original(IDS).logits, 1e-5)
    agree(repackage(host), original)
    narrow = polymix.convert(copy.deepcopy(original), "local:window=3", input={"input_ids": IDS})
    for one, other in zip(narrow.adapters.values(), report.adapters.values(), strict=True):
        for key, value in other.mixer.state_dict().items():
            assert torch.equal(one.mixer.state_dict()[key], value), "a window scaled the weights"


@pytest.mark.parametrize("kind", HOSTS)
def test_the_saved_folder_is_the_same_model(kind, tmp_path):
    model = repackage(converted(HOSTS[kind](), "1:1"))
    model.save_pretrained(tmp_path)
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
    assert torch.equal(again(IDS).logits, model(IDS).logits)
    assert type(again) is type(model) and again.generation_config.eos_token_id == 1


def test_what_a_host_can_be_told_has_its_place():
    """Scales of the logits go into W_q, biases and other activations' names where they belong."""
    for host in (
        gpt(scale_attn_by_inverse_layer_idx=True), gpt(scale_attn_weights=False), gpt(n_inner=20), gpt(tie_word_embeddings=False),
        gpt(activation_function="gelu_pytorch_tanh", layer_norm_epsilon=1e-3), llama(attention_bias=True), llama(mlp_bias=True),
        llama(rope_parameters={"rope_type": "default", "rope_theta": 50.0}), llama(tie_word_embeddings=True, rms_norm_eps=1e-2),
    ):  # fmt: skip
        agree(repackage(host), host)
        agree(repackage(converted(host, "1:1")), host)


def test_embeddings_stay_tied_or_apart():
    for host, tied in ((gpt(), True), (llama(), False)):
        model = repackage(host)
        assert (model.lm_head.weight is model.model.embed.weight) is tied is model.config.tie_word_embeddings
        assert model.num_parameters() == sum(p.numel() for p in model.parameters()), "counted twice"


def test_the_host_is_left_as_it_is_and_shares_nothing():
    host = converted(gpt(), "1:1")
    before = {key: value.clone() for key, value in host.state_dict().items()}
    jitter(repackage(host))
    assert all(torch.equal(host.state_dict()[key], value) for key, value in before.items())


def test_type_mode_and_dropout_are_the_hosts():
    model = repackage(gpt(resid_pdrop=0.3).bfloat16().train())
    assert model.dtype == torch.bfloat16 and model.training
    assert model.config.dropout == model.model.blocks[0].mix.mixer.config.dropout == 0.3


def extended():
    host = gpt()
    host.transformer.h[1].register_parameter("gain", torch.nn.Parameter(torch.ones(16)))
    return host


SCALED = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}


@pytest.mark.parametrize(("host", "plan", "named"), [
    (lambda: llama(rope_parameters=SCALED), None, "scaled"), (lambda: llama(head_dim=8), None, "heads"),
    (lambda: gpt(activation_function="relu"), None, "activation"), (lambda: llama(hidden_act="gelu"), "pom", "activation"),
    (lambda: gpt(add_cross_attention=True), None, "crossattention"), (extended, "pom", "h.1.gain"),
    (lambda: transformers.GPT2Model(gpt().config), None, "GPT2LMHeadModel"),
])  # fmt: skip
def test_what_has_no_place_is_told(host, plan, named):
    with pytest.raises(OptionError, match=named) as told:
        repackage(converted(host(), plan))
    assert "--keep-host" in told.value.cure


def test_a_mixer_without_a_state_is_told():
    with pytest.raises(CapabilityError, match="keep-host"):
        repackage(converted(gpt(), "knn:k=3"))


def test_scaled_angles_hinder_no_layer_that_lost_its_attention():
    host = converted(llama(rope_parameters=SCALED), "pom")
    agree(repackage(host), host)
    for plan in ("softmax", "local"):
        with pytest.raises(OptionError, match="scaled"):
            polymix.convert(llama(rope_parameters=SCALED), plan)
    polymix.convert(llama(rope_parameters=SCALED), "local:rotary=1000")  # said in so many words


def test_a_mixer_that_stood_without_angles_gets_none():
    """Llama's own are attention's; a mixer that was trained without must not be turned when the folder is loaded."""
    model = repackage(converted(llama(), "1:1"))
    assert [layer["rotary"] for layer in model.config.mixers] == [None, 1e4]
    assert [c.rotary for c in type(model.config)(**model.config.to_diff_dict()).layer_configs()] == [None, 1e4]
