"""Mixers of queries, keys and values inside a layer of transformers, whose maps, norms and angles they borrow."""

import copy
import threading

import pytest
import torch

import polymix
from polymix import errors
from polymix.convert.adapters.transformers.families import BorrowingAdapter
from polymix.convert.heads import Heads
from polymix.mixers.heads_mixer import borrowing
from polymix.mixers.registry import config_class
from tests.contracts.library_cases import whisper_config
from tests.convert.test_families import GROUPED, IDS, SMALL, encoder, known, language, logits, transformers
from tests.helpers import slow_but

ATTENDING = [name for name in polymix.list_mixers() if config_class(name)().attends]
RECURRENT = [name for name in ATTENDING if config_class(name).mixer.capabilities.recurrent]
TOKENS = {"max_new_tokens": 4, "do_sample": False}


def borrows(report):
    return all(isinstance(adapter, BorrowingAdapter) for adapter in report.adapters.values())


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("name", ATTENDING)
def test_a_mixer_is_attend_between_its_projections(name, causal):
    """What a layer that projects for a mixer gets is what the mixer computes itself; and no projection is left in it."""
    if causal and not config_class(name).mixer.capabilities.causal:
        pytest.skip("untested: the mixer is not causal")
    if not causal and config_class(name)().causal_by_build:
        pytest.skip("untested: the mixer is always causal")
    mixer = polymix.create_mixer(name, 16, dtype=torch.float64)
    x, mask = torch.randn(2, 7, 16, dtype=torch.float64), torch.ones(2, 7, dtype=torch.bool)
    mask[:, 5:] = False
    q, k, v = (part.transpose(1, 2) for part in mixer.qkv(x, x))
    y, _ = mixer.attend(q, k, v, mask=mask, causal=causal)
    expected, proj = mixer(x, mask=mask, causal=causal), mixer.proj
    torch.testing.assert_close(proj(y.transpose(1, 2).flatten(2)), expected)
    lent = borrowing(mixer, 24)
    torch.testing.assert_close(lent.attend(q, k, v, mask=mask, causal=causal)[0], y)
    assert not any(parameter.shape[0] == 16 for parameter in lent.parameters())
    with pytest.raises(errors.CapabilityError, match="projections belong to the layer"):
        lent(x)


def test_relu_linear_is_lent_without_its_norm():
    """Its BatchNorm comes after W_o, which stays the layer's."""
    config = config_class("relu_linear")(heads=2, norm=None)
    assert config.attends and not config_class("relu_linear")().attends
    mixer = config.build(16, dtype=torch.float64)
    x, mask = torch.randn(2, 7, 16, dtype=torch.float64), torch.arange(7).expand(2, -1) < 5
    columns = mixer.mla.qkv(x.transpose(1, 2).unsqueeze(-1)).squeeze(-1)
    q, k, v = columns.unflatten(1, (2, 3, 8)).transpose(-1, -2).unbind(2)
    y, _ = mixer.attend(q, k, v, mask=mask)
    expected, out = mixer(x, mask=mask), mixer.mla.proj.conv
    ours = y.transpose(1, 2).flatten(2) @ out.weight.flatten(1).t() + out.bias
    torch.testing.assert_close(ours[mask], expected[mask])
    assert not list(borrowing(mixer, 24).parameters())
    model = encoder("modernbert")
    assert borrows(polymix.convert(model, config_class("relu_linear")(norm=None)))
    assert logits(model).isfinite().all()


@pytest.mark.parametrize("kind", ["qwen3", "olmo2", "gpt_neox", "mistral"])
def test_softmax_in_that_place_is_the_layer_itself(kind):
    """Norms of queries and keys, partial and whole rotary angles and grouped heads are all kept."""
    model = language(kind)
    before = logits(model)
    report = polymix.convert(model, "softmax")
    assert borrows(report)
    torch.testing.assert_close(logits(model, use_cache=False), before)
    assert "norms and angles" in str(report)


@pytest.mark.parametrize("mixer", RECURRENT)
def test_generation_keeps_a_state_a_layer(mixer, tmp_path):
    """With beams and with padding on the left too; saved, loaded and undone to the bit."""
    model = language("qwen3")
    before = logits(model)
    report = polymix.convert(model, mixer)
    assert borrows(report)
    for beams in (1, 3):
        one, two = (model.generate(IDS, use_cache=use, num_beams=beams, **TOKENS) for use in (True, False))
        assert torch.equal(one, two), f"the cache changes what is generated with {beams} beams"
    alone = model.generate(IDS[:1], **TOKENS)
    padded, mask = torch.cat((torch.zeros_like(IDS[:1, :2]), IDS[:1]), 1), torch.ones(1, 8, dtype=torch.long)
    mask[:, :2] = 0
    assert torch.equal(model.generate(padded, attention_mask=mask, **TOKENS)[:, 2:], alone), "padding is read"
    polymix.save_pretrained(model, tmp_path)
    assert torch.equal(logits(polymix.load_pretrained(tmp_path)), logits(model))
    report.undo()
    assert torch.equal(logits(model), before)


def test_local_attention_keeps_angles_windows_and_packed_sequences():
    """A window as long as the input is the layer itself; a shorter one generates from a state of its length."""
    model = language("qwen3")
    before = logits(model)
    report = polymix.convert(model, "local")
    assert borrows(report)
    torch.testing.assert_close(logits(model, use_cache=False), before)
    report.undo()
    report = polymix.convert(model, "local:window=3")
    assert all(layer.error > 0.01 for layer in report.layers) and borrows(report)
    one, two = (model.generate(IDS, use_cache=use, **TOKENS) for use in (True, False))
    assert torch.equal(one, two)
    assert all(adapter.mixer.capabilities.recurrent for adapter in report.adapters.values())
    adapter = report.adapters["model.layers.0.self_attn"]
    q, k, v = torch.randn(3, 2, 4, 6, 8)
    heads = Heads(q, k, v)
    both = adapter.mix(heads, segments=torch.tensor([[0, 0, 1, 1, 1, 1]] * 2))
    alone = [adapter.mix(Heads(*(part[:, :, at] for part in (q, k, v)))) for at in (slice(2), slice(2, 6))]
    torch.testing.assert_close(both, torch.cat(alone, 2))


def test_a_sequence_in_pieces_is_the_sequence():
    model = language("qwen3")
    polymix.convert(model, "qt")
    cache, parts = None, []
    with torch.no_grad():
        for i in range(0, 6, 2):
            piece = model(IDS[:, i : i + 2], past_key_values=cache, use_cache=True)
            cache, parts = piece.past_key_values, [*parts, piece.logits]
    torch.testing.assert_close(torch.cat(parts, 1), logits(model, use_cache=False))


@pytest.mark.parametrize("mixer", [name for name in ATTENDING if not config_class(name)().causal_by_build])
def test_an_encoder_reads_no_padding(mixer):
    model = encoder("modernbert")
    report = polymix.convert(model, mixer)
    assert borrows(report)
    other, mask = IDS.clone(), torch.ones_like(IDS)
    other[:, -1], mask[:, -1] = 11, 0
    one, two = (logits(model, ids, attention_mask=mask)[:, :-1] for ids in (IDS, other))
    torch.testing.assert_close(one, two)
    assert not torch.allclose(logits(model)[:, 0], logits(model, other)[:, 0]), "later tokens are not seen"


def test_the_mixer_and_the_layer_learn():
    model = language("qwen3")
    polymix.convert(model, "qt")
    model.train()(IDS, labels=IDS, use_cache=False).loss.backward()
    layer = model.model.layers[0].self_attn
    assert all(part.grad is not None and bool(part.grad.any()) for part in layer.parameters())


def test_a_copy_asks_its_own_mixer():
    model = language("qwen3")
    polymix.convert(model, "qt")
    other = copy.deepcopy(model)
    for adapter in (part for part in other.modules() if isinstance(part, BorrowingAdapter)):
        assert vars(adapter.attention)["polymix"] is adapter
        torch.nn.init.zeros_(adapter.mixer.scale[0])
    assert not torch.allclose(logits(model), logits(other))


def test_threads_have_their_own_caches():
    model, results = language("qwen3"), {}
    polymix.convert(model, "qt")
    expected = [model.generate(IDS[:1, :n], **TOKENS) for n in (2, 4, 6)]

    def run(i, n):
        results[i] = [model.generate(IDS[:1, :n], **TOKENS) for _ in range(3)]

    threads = [threading.Thread(target=run, args=(i, n)) for i, n in enumerate((2, 4, 6))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(result, expected[i]) for i in range(3) for result in results[i])


@pytest.mark.slow
def test_a_compiled_layer_lets_go_of_its_cache():
    model = language("qwen3")
    report = polymix.convert(model, "qt")
    expected = logits(model, use_cache=True)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager"), use_cache=True), expected)
    assert all(adapter.latest_cache is None for adapter in report.adapters.values())


@pytest.mark.slow
def test_compiled_and_exported():
    model = language("qwen3")
    polymix.convert(model, "qt")
    expected = logits(model, use_cache=False)
    compiled = torch.compile(model, backend="eager")
    torch.testing.assert_close(logits(compiled, use_cache=False), expected)
    program = torch.export.export(model, (), {"input_ids": IDS, "use_cache": False}, strict=False)
    torch.testing.assert_close(program.module()(input_ids=IDS, use_cache=False)[0], expected)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_proves_as_much(dtype):
    model = language("qwen3").to(dtype)
    assert borrows(polymix.convert(model, "qt"))
    assert logits(model).isfinite().all()
    other = language("qwen3").to(dtype)
    assert all("poly.weight" in layer.inherited for layer in polymix.convert(other, "pom").layers), "W_v was not proven"


def test_what_acts_on_the_logits_is_lost_by_name_alone():
    """Gemma 2's soft cap and T5's relative bias: softmax with them is the layer, and their loss is in the report."""
    model = language("gemma2", **GROUPED, layer_types=["full_attention"] * 2)
    with pytest.raises(errors.OptionError, match="soft_cap"):
        polymix.convert(model, "qt")
    report = polymix.convert(model, "qt", drop=("soft_cap",))
    assert borrows(report) and "soft_cap" in report.layers[0].dropped
    config = transformers.T5Config(vocab_size=64, d_model=32, d_kv=8, num_heads=4, d_ff=48, num_layers=1,
                                   num_decoder_layers=1, pad_token_id=0, decoder_start_token_id=0)  # fmt: skip
    model = transformers.T5ForConditionalGeneration(config).eval()
    report = polymix.convert(model, "linear", drop=("position_bias",))
    assert borrows(report) and len(report.adapters) == 3
    one, two = (model.generate(IDS, use_cache=use, **TOKENS) for use in (True, False))
    assert torch.equal(one, two)


def test_cross_attention_borrows_too():
    """Whisper's decoder: keys and values of the sound stay in the host's own cache."""
    known("whisper")
    config = whisper_config()
    model = transformers.WhisperForConditionalGeneration(config).eval()
    sound = torch.randn(1, 16, 40)
    with torch.no_grad():
        before = model(sound, decoder_input_ids=IDS[:1]).logits
    report = polymix.convert(model, "softmax")
    assert borrows(report) and sum(adapter.cross for adapter in report.adapters.values()) == 1
    with torch.no_grad():
        torch.testing.assert_close(model(sound, decoder_input_ids=IDS[:1], use_cache=False).logits, before)
    report.undo()
    polymix.convert(model, "qt")
    one, two = (model.generate(sound, use_cache=use, **TOKENS) for use in (True, False))
    assert torch.equal(one, two)


def test_what_the_function_is_not_told_before_is_refused():
    """A keyword that the proof did not see may mean anything."""
    model = language("qwen3")
    polymix.convert(model, "qt")
    with pytest.raises(errors.CapabilityError, match="cu_seq_lens_k"):
        model(IDS, cu_seq_lens_k=torch.tensor([0, 6, 12]), use_cache=False)


def test_parts_of_the_layer_stay_in_their_mode():
    """A frozen part in evaluation mode inside a model in training: `undo` gives it back so."""
    model = language("qwen3").train()
    part = model.model.layers[0].self_attn.q_norm.eval()
    polymix.convert(model, "qt").undo()
    assert not part.training and model.model.layers[0].self_attn.training


def test_a_plan_with_other_heads_or_fresh_weights_projects_itself():
    for plan, options in (("qt:heads=2", {}), ("qt", {"init": "fresh"})):
        report = polymix.convert(language("mistral", **SMALL), plan, **options)
        assert not borrows(report)


@pytest.mark.parametrize("broken", slow_but((), ["answer", "forward"], ["answer"]))
def test_a_graph_that_breaks_inside_a_layer_keeps_its_cache(broken, monkeypatch):
    """Whichever part then runs outside the graph: the next token continues from the state."""
    model = language("qwen3")
    report = polymix.convert(model, "qt")
    expected = model.generate(IDS[:1], use_cache=True, **TOKENS)
    for adapter in report.adapters.values():
        outside = torch._dynamo.disable(getattr(adapter, broken), recursive=broken == "answer")
        monkeypatch.setattr(adapter, broken, outside)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    state = transformers.DynamicCache(config=model.config)
    with torch.no_grad():
        compiled(expected[:, :-1], past_key_values=state, use_cache=True)
        last = compiled(expected[:, -1:], past_key_values=state, use_cache=True).logits[:, -1]
        torch.testing.assert_close(last, logits(model, expected, use_cache=False)[:, -1])
    assert all(adapter.latest_cache is None for adapter in report.adapters.values())
