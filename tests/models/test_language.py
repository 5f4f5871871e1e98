"""Configs and their errors, presets, the models at their init and in training, and how long a text they take."""

import copy
import json
import math
import pickle

import pytest
import torch

from polymix import PomConfig, errors
from polymix.mixers.registry import mixer_class
from polymix.models.language import PRESETS, PolymixGPTConfig, PolymixLlamaConfig, matched, parameters, preset
from polymix.models.language.layers import mixers_of
from tests.models.tiny import IDS, LEFT, MIXERS, SHAPES, VOCAB, config, error, fresh, tiny

CANNOT = [name for name, kind in ((n, mixer_class(n)) for n in ("poly_nl", "knn", "xca", "sima", "se"))
          if not kind.capabilities.recurrent]  # fmt: skip


# -- configs


@pytest.mark.parametrize(
    ("mixers", "options", "kind", "says"),
    [
        ("pomm", {}, errors.UnknownNameError, "expected pom.*got 'pomm'"),
        (["pom", "padrr-3"], {}, errors.UnknownNameError, "expected padre.*got 'padrr'"),
        ("pom:degre=3", {}, errors.OptionError, "degre.*Choose from the options of pom: degree"),
        (["pom"] * 3, {}, errors.OptionError, "mixers.*3 for 2 layers.*Drop some"),
        ([], {}, errors.OptionError, "mixers.*none"),
        ([{"degree": 3}], {}, errors.OptionError, r"mixers\[0\].*a dict with \"name\""),
        (["pom", 3], {}, errors.OptionError, r"mixers\[1\]"),
        (["pom", {"name": "pomm"}], {}, errors.UnknownNameError, "pomm"),
        ([{"name": "pom", "degre": 3}], {}, errors.OptionError, "degre"),
        ("pom", {"num_heads": 3}, errors.OptionError, "num_heads.*a divisor of hidden_size=16"),
        ("pom", {"positions": "alibi"}, errors.OptionError, "'learned', 'rotary', 'none'.*'alibi'"),
        ("pom", {"vocab_size": 0}, errors.OptionError, "vocab_size"),
        ("pom", {"hidden_size": 16.0}, errors.OptionError, "hidden_size"),
        ("pom", {"num_layers": True}, errors.OptionError, "num_layers"),
        ("pom", {"max_position_embeddings": -1}, errors.OptionError, "max_position_embeddings"),
        ("pom", {"intermediate_size": 0}, errors.OptionError, "intermediate_size"),
        ("pom", {"short_conv": -1}, errors.OptionError, "short_conv"),
        ("pom", {"dropout": 1.0}, errors.OptionError, "dropout"),
        ("pom", {"bias": "yes"}, errors.OptionError, "bias"),
        ("pom", {"rope_theta": 0.0}, errors.OptionError, "rope_theta"),
        ("pom", {"norm_eps": -1.0}, errors.OptionError, "norm_eps"),
        ("pom", {"initializer_range": -0.1}, errors.OptionError, "initializer_range"),
        ("pom", {"use_cache": "no"}, errors.OptionError, "use_cache"),
        ("pom", {"tie_word_embeddings": 1}, errors.OptionError, "tie_word_embeddings"),
    ],
)  # fmt: skip
def test_an_option_that_makes_no_sense_raises_in_the_config(mixers, options, kind, says):
    with pytest.raises(kind, match=says):
        config(mixers, **options)


@pytest.mark.parametrize("name", CANNOT)
def test_a_mixer_without_a_state_raises_and_names_those_with_one(name):
    with pytest.raises(errors.CapabilityError, match=rf"mixers, layer 1.*padre, pom, qt.*this {name} cannot do"):
        fresh(["pom", name])


def test_an_implicit_hyena_raises():
    """Its filters serve one length, so that it has no state."""
    with pytest.raises(errors.CapabilityError, match="hyena"):
        fresh("hyena")


@pytest.mark.parametrize("name", MIXERS)
def test_a_config_comes_back_from_json_as_it_was(name, tmp_path):
    for shape in SHAPES:
        said = config(MIXERS[name], shape)
        said.mixers = [layer.to_dict() for layer in said.layer_configs()]
        said.save_pretrained(tmp_path)
        back = type(said).from_pretrained(tmp_path)
        assert back.layer_configs() == said.layer_configs() == config(MIXERS[name], shape).layer_configs()
        assert json.loads(back.to_json_string()) == json.loads(said.to_json_string())


def test_mixers_are_said_as_names_configs_dicts_or_a_pattern():
    expected = config(["pom:degree=3", "pom:degree=3"]).layer_configs()
    for said in ("pom-3", "pom:degree=3", PomConfig(degree=3), [{"name": "pom", "degree": 3}], ("pom-3",)):
        assert config(said).layer_configs() == expected
    names = [layer.name for layer in config(["pom", "local", "qt"], num_layers=5).layer_configs()]
    assert names == ["pom", "local", "qt", "pom", "local"]


def test_what_an_entry_says_itself_stands_and_the_model_settles_the_rest():
    mixers = ["pom:dropout=0.3:bias=true", {"name": "softmax", "heads": 4, "rotary": 500.0}, "local", "padre"]
    first, second, third, last = config(mixers, "llama", num_layers=4, dropout=0.1, rope_theta=50.0).layer_configs()
    assert (first.dropout, first.bias, first.rotary) == (0.3, True, "1d")
    assert (second.dropout, second.bias, second.heads, second.rotary) == (0.1, False, 4, 500.0)
    assert (third.heads, third.rotary) == (2, 50.0)
    assert last.causal


# -- presets


@pytest.mark.parametrize("name", PRESETS)
def test_presets_have_the_parameters_of_the_papers(name):
    twin, paper, near = ("gpt2-s", 124.5e6, 0.005) if "llama" not in name else ("llama-300m", 300e6, 0.07)
    count = parameters(preset(name))
    assert abs(count - parameters(preset(twin))) <= 0.005 * count, "not matched to attention"
    assert abs(count - paper) <= near * paper


def test_presets_take_changes_and_names_that_are_not_known_raise():
    small = preset("gppom2-s-hybrid", hidden_size=64, num_layers=2, num_heads=2, vocab_size=VOCAB)
    assert [layer.name for layer in small.layer_configs()] == ["pom", "local"]
    like = matched(config("softmax", hidden_size=64), multiple=1)
    assert abs(parameters(matched(config("mamba", hidden_size=64), like, multiple=1)) - parameters(like)) < 200
    assert preset("gpt2-s", intermediate_size=7).intermediate_size == 7
    with pytest.raises(errors.UnknownNameError, match=r"gppom2-s.*'gppom'"):
        preset("gppom")


def test_parameters_counts_tied_ones_once():
    for shape in ("gpt", "llama"):
        for tied in (True, False):
            options = {"tie_word_embeddings": tied}
            model = fresh("pom", shape, **options)
            assert parameters(config("pom", shape, **options)) == sum(p.numel() for p in model.parameters())


# -- at the init, and in training


def gradients(model, **inputs):
    model.zero_grad(set_to_none=True)
    model(**{"input_ids": IDS, "attention_mask": LEFT, "labels": IDS, **inputs}).loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("shape", ["gpt", "llama", "gpt-none"])
@pytest.mark.parametrize("name", MIXERS)
def test_a_fresh_model_knows_nothing_and_every_parameter_learns(name, shape):
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (4, 40))
    model = fresh(MIXERS[name], shape, hidden_size=32, num_heads=4)
    assert abs(model(ids, labels=ids).loss.item() - math.log(VOCAB)) < 0.1
    grads = gradients(model, input_ids=ids, attention_mask=None, labels=ids)
    for where, parameter in model.named_parameters():
        assert where in grads and grads[where].isfinite().all(), where
        assert grads[where].any() or where.endswith(".bias"), f"{where} cannot learn"  # a key's bias plays no part
        assert parameter.requires_grad


def test_labels_are_shifted_and_what_is_ignored_does_not_count():
    model = tiny("pom-local", "llama")
    labels = IDS.masked_fill(LEFT == 0, -100)
    out = model(IDS, LEFT, labels=labels)
    expected = torch.nn.functional.cross_entropy(out.logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
    torch.testing.assert_close(out.loss, expected)


def checkpointing(model, options):
    """By its name from transformers 5 on, or before."""
    getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)(options)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("name", ["pom-local", "pom-softmax", "mamba", "padre-3", "performer"])
def test_checkpointing_gives_the_same_gradients(name, reentrant):
    model = copy.deepcopy(tiny(name, "llama")).train()
    expected = gradients(model)
    checkpointing(model, {"use_reentrant": reentrant})
    calls = []
    model.model.blocks[0].norm1.register_forward_hook(lambda *_: calls.append(1))
    grads = gradients(model)
    assert len(calls) == 2, "nothing was computed again"
    assert grads.keys() == expected.keys()
    assert max(error(grads[name], expected[name]) for name in grads if expected[name].any()) <= 1e-5


@pytest.mark.parametrize("name", MIXERS)
def test_autocast(name):
    model = copy.deepcopy(tiny(name, "llama"))
    expected = model(IDS, LEFT).logits[LEFT.bool()]
    with torch.autocast("cpu", torch.bfloat16):
        out = model(IDS, LEFT, labels=IDS)
        step = model(IDS[:, :1], torch.ones(3, 13), past_key_values=model(IDS).past_key_values)
        last = model(torch.cat((IDS, IDS[:, :1]), 1), use_cache=False).logits[:, -1:]
    assert error(out.logits[LEFT.bool()], expected) < 0.1
    assert error(step.logits, last) < 0.1
    out.loss.backward()
    assert all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)


@pytest.mark.parametrize("name", ["pom-local", "performer", "padre-3"])
def test_copies_give_the_same_logits(name):
    model = tiny(name)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(other(IDS).logits, model(IDS).logits)


def test_hidden_states_embeddings_and_tuples():
    model = tiny("pom-local", "llama")
    out = model(IDS, output_hidden_states=True)
    assert len(out.hidden_states) == 3
    assert torch.equal(model.lm_head(out.hidden_states[-1]), out.logits)
    assert torch.equal(model(inputs_embeds=model.get_input_embeddings()(IDS)).logits, out.logits)
    assert torch.equal(model(IDS, return_dict=False)[0], out.logits)
    assert torch.equal(model.model(IDS).last_hidden_state, out.hidden_states[-1])


@pytest.mark.parametrize("inputs", [{}, {"input_ids": IDS, "inputs_embeds": torch.zeros(3, 12, 16)}])
def test_ids_or_embeddings_are_needed(inputs):
    with pytest.raises(errors.ShapeError, match="input_ids and inputs_embeds"):
        tiny("pom")(**inputs)


def test_scores_that_no_mixer_has_are_refused():
    with pytest.raises(errors.OptionError, match="output_attentions"):
        tiny("pom")(IDS, output_attentions=True)


# -- length


@pytest.mark.parametrize("name", ["pom-local", "softmax", "mamba"])
def test_texts_longer_than_those_trained_for(name):
    ids = torch.randint(VOCAB, (1, 150))
    for shape in ("llama", "gpt-none"):
        assert tiny(name, shape)(ids).logits.isfinite().all()
        assert tiny(name, shape).generate(ids, max_new_tokens=3).shape == (1, 153)
    model, ran = tiny(name, "gpt"), []
    hook = model.model.blocks[0].register_forward_pre_hook(lambda *_: ran.append(1))
    with pytest.raises(errors.ShapeError, match=r'max_position_embeddings=64.*position 149.*positions="rotary"'):
        model(ids)
    hook.remove()
    assert not ran, "a layer ran before the error"
    assert model(ids[:, :64]).logits.isfinite().all()


def test_positions_count_real_tokens_alone():
    """100 tokens of which 60 are real fit into 64 learned positions."""
    ids, mask = torch.randint(VOCAB, (1, 100)), torch.ones(1, 100, dtype=torch.long)
    mask[:, :40] = 0
    assert error(tiny("pom")(ids, mask).logits[:, 40:], tiny("pom")(ids[:, 40:]).logits) <= 1e-5


def test_the_model_uses_each_mixer_that_the_config_says():
    assert [mixer.name for mixer in mixers_of(tiny("pom-local"))] == ["pom", "local"]
    for shape, kind in (("gpt", PolymixGPTConfig), ("llama", PolymixLlamaConfig)):
        assert type(tiny("pom", shape).config) is kind


@pytest.mark.parametrize(("name", "tokens_seen"), [("llama-300m-padre", 201), ("llama-300m-padre-dilated", 3171)])
def test_how_far_a_token_of_padre_s_presets_sees(name, tokens_seen):
    """One convolution on the way through each layer, as the docs say; measured on the first layers by the gradient."""
    config = preset(name)
    layers = [layer.build(4, dtype=torch.float64) for layer in config.layer_configs()]
    reach = [layer.A[1].reach for layer in layers]
    assert (len(reach), 1 + sum(reach)) == (20, tokens_seen)
    assert (tokens_seen >= config.max_position_embeddings) == ("dilated" in name)
    assert not any("rotary" in layer.config.to_dict() for layer in layers)
    x = torch.randn(1, 90, 4, dtype=torch.float64, requires_grad=True)
    y = x
    for layer in layers[:3]:
        y = y + layer(y)
    y[0, -1].square().sum().backward()
    seen = x.grad.abs().sum(-1)[0].nonzero()
    assert 90 - seen.min() == 1 + sum(reach[:3])
    assert len(seen) == 1 + sum(reach[:3]), "without gaps"
