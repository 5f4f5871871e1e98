"""More tokens than a text model was trained with: `convert(context=)`."""

import pytest
import torch

import polymix
from polymix.convert.context import extended, longest
from polymix.errors import CapabilityError, OptionError
from tests.convert.checks import refuses
from tests.convert.test_families import GROUPED, SMALL, encoder, known, language, logits, transformers

LONG = 80
IDS = torch.randint(3, 60, (1, LONG), generator=torch.Generator().manual_seed(0))
GPT = {
    "n_embd": 32,
    "n_layer": 2,
    "n_head": 4,
    "n_positions": 64,
    "vocab_size": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LINEAR = {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
YARN = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 32}
HOSTS = {
    "gpt2": (GPT, None), "llama": (GROUPED, None), "qwen3": ({**GROUPED, **LINEAR}, "interpolate"),
    "olmo2": ({"rope_parameters": YARN, **GROUPED}, "interpolate"), "opt": ({"word_embed_proj_dim": 32}, "repeat"),
}  # fmt: skip


def state(model):
    """Everything that a longer context changes: weights, buffers, config."""
    return {**model.state_dict(), **dict(model.named_buffers())}, model.config.to_json_string(use_diff=False)


def unchanged(before, after):
    assert before[1] == after[1] and before[0].keys() == after[0].keys()
    assert all(torch.equal(value, after[0][name]) for name, value in before[0].items())


@pytest.mark.parametrize("kind", HOSTS)
def test_a_language_model_generates_beyond_its_limit_saves_and_comes_back(kind, tmp_path):
    options, positions = HOSTS[kind]
    model = language(kind, **options)
    before, text = state(model), {name: value.clone() for name, value in model.state_dict().items()}
    report = polymix.convert(model, {"*.0.*": "qt" if kind == "qwen3" else "pom"}, context=LONG, positions=positions)
    assert longest(model) == LONG and f"{LONG} tokens instead of 64" in str(report)
    one, two = (model.generate(IDS[:, :70], use_cache=use, max_new_tokens=8, do_sample=False) for use in (True, False))
    assert one.shape[1] == 78 and torch.equal(one, two)
    polymix.save_pretrained(model, tmp_path)
    assert torch.equal(logits(polymix.load_pretrained(tmp_path), IDS), logits(model, IDS))
    report.undo()
    unchanged(before, state(model))
    assert all(torch.equal(text[name], value) for name, value in model.state_dict().items())
    report.redo()
    assert longest(model) == LONG and logits(model, IDS).isfinite().all()


@pytest.mark.parametrize("kind", ["roberta", "bert", "modernbert"])
def test_an_encoder_reads_beyond_its_limit(kind):
    """RoBERTa's first positions stand for padding: 66 rows are 64 tokens, and its limit in the config has them too."""
    known(kind)
    options = {**SMALL, "max_position_embeddings": 66, "pad_token_id": 1} if kind == "roberta" else SMALL
    config = transformers.AutoConfig.for_model(kind, **options)
    model = encoder(kind) if kind == "modernbert" else transformers.AutoModel.from_config(config).eval()
    before = state(model)
    report = polymix.convert(model, "pom", context=LONG)
    assert report.context.before == 64 and logits(model, IDS).shape == (1, LONG, 32)
    report.undo()
    unchanged(before, state(model))


def test_learned_positions_keep_their_ends_and_other_weights():
    model = language("gpt2", **GPT)
    old = model.transformer.wpe.weight
    new = {
        way: polymix.convert(model, "pom", copy=True, context=127, positions=way).model.transformer.wpe.weight
        for way in ("interpolate", "repeat", "none")
    }
    torch.testing.assert_close(new["interpolate"][::2], old, msg="every second one is an old one")
    torch.testing.assert_close(new["interpolate"][1], (old[0] + old[1]) / 2)
    assert torch.equal(new["repeat"], torch.cat((old, old[:63])))
    assert not new["none"].any() and not new["none"].requires_grad, "what is dropped is not learned anew"
    assert model.transformer.wpe.num_embeddings == 64, "a copy is converted"


def test_angles_are_scaled_or_go_on_as_they_are():
    model = language("llama", **GROUPED)
    old = model.model.rotary_emb.inv_freq
    for positions, factor in (("interpolate", 1.25), (None, 1.0)):
        report = polymix.convert(model, "pom", context=LONG, positions=positions)
        torch.testing.assert_close(model.model.rotary_emb.inv_freq * factor, old)
        report.undo()


def test_the_teacher_reads_as_many_tokens():
    """Distilling at the new length compares with attention that has the new positions; `undo` takes both back."""
    model = language("gpt2", **GPT)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    report = polymix.convert(model, "pom", context=LONG)
    data = [{"input_ids": IDS, "labels": IDS}]
    polymix.distill(report, data, val=data, metric=polymix.train.distill.perplexity, say=lambda line: None)
    with report.former() as host:
        assert logits(host, IDS).isfinite().all() and longest(host) == LONG
    report.undo()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


@pytest.mark.parametrize(("kind", "options", "reason"), [
    ("gpt2", {"context": 64}, "takes 64"), ("gpt2", {"context": LONG, "positions": "continue"}, "learned positions"),
    ("llama", {"context": LONG, "positions": "repeat"}, "rotary angles"), ("gpt2", {"context": 0}, "context"),
    ("gpt2", {"context": LONG, "positions": "drop"}, "interpolate"), ("gpt2", {"positions": "repeat"}, "positions"),
    ("bloom", {"context": LONG}, "states no limit"),
])  # fmt: skip
def test_what_cannot_be_extended(kind, options, reason):
    sizes = {"gpt2": GPT, "llama": GROUPED, "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "vocab_size": 64}}
    refuses(language(kind, **sizes[kind]), "pom", OptionError, reason, **options)


@pytest.mark.parametrize(("argument", "option"), [("context", "positions"), ("--context", "--positions")])
def test_errors_name_the_option_that_was_passed(argument, option):
    model = language("llama", **GROUPED, rope_parameters={"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0})
    with pytest.raises(OptionError) as caught:
        extended(model, LONG, "interpolate", argument)
    assert caught.value.argument == option


def test_a_refused_conversion_takes_the_context_back():
    model = language("gpt2", **GPT)
    before = state(model)
    refuses(model, "sima", CapabilityError, "causal", context=LONG)
    unchanged(before, state(model))
    known("deberta-v2")
    config = transformers.AutoConfig.for_model("deberta-v2", **SMALL, relative_attention=True, pos_att_type=["c2p"])
    refuses(transformers.AutoModel.from_config(config).eval(), "pom", CapabilityError, "rel_embeddings", context=LONG)


def test_pictures_have_a_size_and_no_context():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, intermediate_size=48, image_size=32, patch_size=8
    )
    refuses(transformers.ViTModel(config).eval(), "pom", OptionError, "a text model", context=LONG)
