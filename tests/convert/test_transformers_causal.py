"""GPT-2 and Llama with mixers for attention: masks, packed sequences, cross-attention, graphs."""

from __future__ import annotations

from functools import partial

import pytest
import torch

import polymix
from polymix import errors
from polymix.convert.adapters.transformers import visibility
from tests.convert import checks
from tests.convert.language_hosts import (
    BATCH,
    HOSTS,
    IDS,
    LEFT,
    PACKED,
    RECURRENT,
    RIGHT,
    TOKENS,
    VOCAB,
    checkpointing,
    converted,
    generate,
    given,
    gpt2,
    llama,
    logits,
    real,
    transformers,
)

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together


@pytest.fixture
def learns():
    """Asked for by tests that need gradients."""


@pytest.fixture(autouse=True)
def _without_gradients(request):
    with torch.set_grad_enabled("learns" in request.fixturenames):
        yield


# -- the plumbing: softmax mixers with the host's weights are the host


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
@pytest.mark.parametrize(
    ("host", "options"),
    [
        (gpt2, {}), (gpt2, {"scale_attn_by_inverse_layer_idx": True}), (gpt2, {"scale_attn_weights": False}),
        (llama, {}), (llama, {"attention_bias": True, "num_key_value_heads": 1}),
        (llama, {"rope_parameters": {"rope_theta": 500.0, "rope_type": "default"}}), (llama, {"num_key_value_heads": 4}),
    ],
)  # fmt: skip
def test_softmax_with_the_hosts_weights_gives_the_hosts_logits(host, options, impl):
    model = host(**options)
    model.config._attn_implementation = impl
    for use_cache in (False, True):
        checks.same_as_host(model, given(use_cache=use_cache), of=logits)
        for mask in (LEFT, RIGHT):
            checks.same_as_host(model, given(use_cache=use_cache, attention_mask=mask), of=real(mask))
    checks.same_as_host(model, given(position_ids=PACKED), of=logits)
    checks.same_as_host(
        model, given(attention_mask=LEFT, position_ids=(LEFT.cumsum(1) - 1).clamp_min(0)), of=real(LEFT)
    )


def test_a_host_that_is_told_not_to_be_causal_stays_so():
    for host in (gpt2, llama):
        model = host()
        model.config.is_causal = False
        for use_cache in (False, True):
            checks.same_as_host(model, given(use_cache=use_cache, attention_mask=LEFT), of=real(LEFT))
            checks.same_as_host(model, given(use_cache=use_cache), of=logits)
        model = polymix.convert(model, "pom").model  # recurrent, but a state would have an order
        assert torch.equal(model(IDS).logits, model(**given()).logits)


def test_heads_wider_than_their_share_give_what_has_a_place():
    layer = polymix.convert(llama(head_dim=8), "pom", copy=True).layers[0]
    assert layer.inherited["poly.weight"] == ("v_proj.weight",) and layer.inherited["proj.weight"] == ("o_proj.weight",)
    layer = polymix.convert(llama(head_dim=8), "softmax", copy=True).layers[0]
    assert "v_proj.weight" in layer.dropped  # no silent half


def test_angles_without_a_place_are_named():
    assert polymix.convert(llama(), "pom").layers[0].dropped["rotary"] == "no place in this mixer"
    assert "rotary" not in polymix.convert(llama(), "softmax").layers[0].dropped
    scaled = {"rope_parameters": {"rope_theta": 1e4, "rope_type": "linear", "factor": 2.0}}
    assert "'linear'" in polymix.convert(llama(**scaled), "pom").layers[0].dropped["rotary"]
    checks.refuses(llama(**scaled), "softmax", errors.OptionError, "angles scaled by 'linear'")


def test_grouped_keys_are_repeated_head_by_head():
    model = llama(num_key_value_heads=2)
    mixer = polymix.convert(model, "softmax", copy=True).adapters["model.layers.0.self_attn"].mixer
    keys = mixer.qkv.qkv.weight[16:32].unflatten(0, (4, 4))
    host = model.model.layers[0].self_attn.k_proj.weight.unflatten(0, (2, 4))
    assert torch.equal(keys, host[[0, 0, 1, 1]])


# -- conversions


@pytest.mark.parametrize("mixer", RECURRENT)
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_converts_and_trains(learns, host, mixer):
    inputs = given(attention_mask=LEFT)
    report = checks.converts(host(), mixer, inputs, input=inputs)
    others = given(attention_mask=LEFT)
    others["input_ids"] = torch.where(LEFT.bool(), IDS, (IDS + 7) % VOCAB)
    checks.ignores(report.model, inputs, others, of=real(LEFT))
    compiled = (host, mixer) == (gpt2, "padre")  # the rest is in the mixers' own tests
    checks.survives(report.model, inputs, of=real(LEFT), backend="eager" if compiled else None)
    for use_cache in (False, True):  # the host puts the cache aside, which must not cost a gradient
        checks.checkpoints(report, {**inputs, "use_cache": use_cache}, checkpointing)
    checks.undoes(host(), mixer, inputs)


def test_a_model_trains_with_the_cache_that_it_makes_unasked(learns):
    for mixer in ("pom", "padre", "softmax"):
        model = converted(gpt2, mixer)
        with_cache = checks.gradients(model, {"input_ids": IDS, "attention_mask": LEFT})
        with_cache = {name: grad.clone() for name, grad in with_cache.items()}
        for name, grad in checks.gradients(model, given(attention_mask=LEFT)).items():
            torch.testing.assert_close(grad, with_cache[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_what_has_no_order_is_refused(host):
    for mixer in ("poly_sa", "poly_nl", "sima"):
        checks.refuses(host(), mixer, errors.CapabilityError, "causal order")
    checks.refuses(host(), "hyena", errors.CapabilityError, "any")  # implicit filters serve one length


@pytest.mark.parametrize("mixer", ["softmax", *RECURRENT])
def test_rows_that_are_padding_alone_stay_finite(mixer):
    mask = LEFT.clone()
    mask[1] = 0
    for impl in ("sdpa", "eager"):
        model = converted(gpt2, mixer)
        model.config._attn_implementation = impl
        for use_cache in (False, True):
            assert model(**given(attention_mask=mask, use_cache=use_cache)).logits.isfinite().all()


# -- masks beyond order and padding


@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
@pytest.mark.parametrize("mixer", ["pom", "softmax"])
@pytest.mark.parametrize("impl", ["sdpa", "eager", "flash_attention_2"])
def test_packed_sequences_do_not_see_each_other(host, mixer, impl):
    model = converted(host, mixer)
    model.config._attn_implementation = impl  # flash attention reads the positions, and no mask is made
    packed = model(**given(position_ids=PACKED)).logits
    for first, last in ((0, 4), (4, 7), (7, 9)):
        alone = model(**given(input_ids=IDS[:, first:last])).logits
        checks.near([packed[:, first:last]], [alone])


def test_a_mask_says_more_than_positions_do():
    adapter, x = converted(gpt2, "pom").transformer.h[0].attn, torch.randn(1, TOKENS, 16)
    packs = (PACKED.diff(prepend=PACKED[:, :1] - 1) != 1).cumsum(1)
    mask = (packs[:, :, None] == packs[:, None])[:, None].tril()
    checks.near([adapter(x, attention_mask=mask, position_ids=PACKED)[0]], [adapter(x, attention_mask=mask)[0]])
    mask[..., 3, 1] = False  # not all of its own sequence
    checks.near([adapter(x, attention_mask=mask, position_ids=PACKED)[0]], [adapter(x, attention_mask=mask)[0]])


def test_packed_sequences_that_nothing_keeps_apart_raise():
    for impl in ("sdpa", "eager"):
        model = converted(gpt2, "pom")
        model.config._attn_implementation = impl
        for options in ({"use_cache": True}, {"attention_mask": torch.ones_like(IDS)}):
            with pytest.raises(errors.MaskError, match="packed sequences that the mask does not separate"):
                model(**given(position_ids=PACKED, **options))
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(errors.MaskError, match="packed sequences with a cache"):
        model(**given(position_ids=PACKED, use_cache=True))


def test_packed_sequences_raise_where_a_mixer_would_mix_them():
    for impl in ("sdpa", "flash_attention_2"):
        model = converted(gpt2, "padre")
        model.config._attn_implementation = impl
        with pytest.raises(errors.CapabilityError, match=r"packed sequences, which this padre cannot do"):
            model(**given(position_ids=PACKED))


def test_positions_that_turn_otherwise_than_the_tokens_raise():
    model, gaps = converted(llama, "softmax"), 2 * torch.arange(TOKENS)[None]
    for mask in (torch.ones_like(IDS), LEFT):
        with pytest.raises(errors.MaskError, match="gaps or repetitions"):
            model(**given(position_ids=gaps, attention_mask=mask))
    moved = given(position_ids=5 + torch.arange(TOKENS)[None], attention_mask=torch.ones_like(IDS))
    checks.same_as_host(llama(), moved, of=logits)  # all by the same: RoPE does not see it


def test_any_other_mask_is_taken_whole_or_not_at_all():
    holes = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    holes[:, :, 5, 1] = False
    for host in (gpt2, llama):
        checks.same_as_host(host(), given(attention_mask=holes), of=logits)
        open_ = torch.ones(1, 1, TOKENS, TOKENS, dtype=torch.bool).expand(BATCH, -1, -1, -1)
        checks.same_as_host(host(), given(attention_mask=open_), of=logits)
    with pytest.raises(
        errors.CapabilityError, match="a mask other than causal order and padding, which this padre cannot do"
    ):
        converted(gpt2, "padre")(**given(attention_mask=holes))
    pom = converted(gpt2, "pom")
    by_head = torch.stack([holes[:, 0], ~holes[:, 0]], 1)
    for mask, match in ((torch.randn(BATCH, 1, TOKENS, TOKENS), "more than hide"), (by_head, "differs between heads")):
        with pytest.raises(errors.MaskError, match=match):
            pom(**given(attention_mask=mask))
    first = pom(**given(attention_mask=holes, use_cache=True))
    with pytest.raises(errors.StateError, match="without a state"):
        pom(IDS[:, :1], past_key_values=first.past_key_values)


def test_a_mask_that_was_written_to_is_read_again():
    model, mask = converted(gpt2, "pom"), torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
    before = model(**given(attention_mask=mask)).logits
    mask[:, :, :, :2] = False
    after = model(**given(attention_mask=mask)).logits
    assert not torch.allclose(before[:, 2:], after[:, 2:], atol=1e-4)


def test_masks_made_under_inference_mode_are_read_by_the_first_layer_alone(monkeypatch):
    """On a GPU every reading waits for all that runs: in each layer, it makes a model several times as slow."""
    model, readings = converted(partial(llama, num_hidden_layers=3), "pom"), []
    read = visibility._read

    def counted(*args):
        readings.append(args)
        return read(*args)

    monkeypatch.setattr(visibility, "_read", counted)
    with torch.inference_mode():
        mask = torch.ones(BATCH, 1, TOKENS, TOKENS, dtype=torch.bool).tril()
        before = logits(model(**given(attention_mask=mask)))
        assert len(readings) == 1
        mask[:, :, :, :2] = False  # which nothing counts
        after = logits(model(**given(attention_mask=mask)))
        assert len(readings) == 2 and not torch.allclose(before[:, 2:], after[:, 2:], atol=1e-4)
        torch.testing.assert_close(after, logits(model(**given(attention_mask=mask.clone()))))


def test_what_a_host_may_ask_beside_raises():
    adapter = converted(gpt2, "pom").transformer.h[0].attn
    x = torch.randn(BATCH, TOKENS, 16)
    for name, value in (("output_attentions", True), ("head_mask", x), ("position_bias", x), ("cache", x),
                        ("past_key_value", x), ("layer_past", x)):  # fmt: skip
        with pytest.raises(errors.CapabilityError, match=f"`{name}`"):
            adapter(x, **{name: value})
    with pytest.raises(errors.MaskError, match="`is_causal`"):
        adapter(x, is_causal=False)
    with pytest.raises(errors.MaskError, match="attn_implementation"):
        adapter(x, attention_mask=object())
    with pytest.raises(errors.MaskError, match=r"\(3, 1, 9, 9\)"):
        adapter(x, attention_mask=torch.ones(BATCH, 1, TOKENS, TOKENS + 1, dtype=torch.bool))


# -- cross-attention


CONTEXT = torch.randn(BATCH, 5, 16, generator=torch.Generator().manual_seed(1))
CONTEXT_MASK = torch.ones(BATCH, 5, dtype=torch.long)
CONTEXT_MASK[0, 3:] = 0


@pytest.mark.parametrize("impl", ["sdpa", "eager"])
def test_cross_attention_is_the_hosts(impl):
    model = gpt2(add_cross_attention=True)
    model.config._attn_implementation = impl
    for mask in (None, CONTEXT_MASK):
        for use_cache in (False, True):
            inputs = given(
                encoder_hidden_states=CONTEXT, encoder_attention_mask=mask, attention_mask=LEFT, use_cache=use_cache
            )
            checks.same_as_host(model, inputs, of=real(LEFT), input=inputs)
    checks.refuses(model, "padre", errors.CapabilityError, "a separate context")


def test_cross_attention_converts(learns):
    plan, model = {"*.attn": "pom", "*.crossattention": "qt"}, gpt2(add_cross_attention=True)
    for impl in ("sdpa", "flash_attention_2"):
        model.config._attn_implementation = impl
        inputs = given(encoder_hidden_states=CONTEXT, encoder_attention_mask=CONTEXT_MASK)
        report = polymix.convert(model, plan, copy=True)
        checks.trains(report, inputs)
        others = {**inputs, "encoder_hidden_states": CONTEXT + 9 * (CONTEXT_MASK == 0)[..., None]}
        checks.ignores(report.model, inputs, others, of=logits)
    keys = report.layers[1].inherited["qkv.qkv.weight"]
    assert keys == ("q_attn.weight", "c_attn.weight[key]", "c_attn.weight[value]")


@pytest.mark.parametrize("plan", [
    {"decoder.*.attn": "pom", "decoder.*.crossattention": "qt"}, {"decoder.*.0.attn": "padre"},
    {"decoder.*.1.crossattention": "pom"},
], ids=str)  # fmt: skip
def test_a_decoder_generates_from_the_cache_of_an_encoder_decoder(plan):
    torch.manual_seed(0)
    config = transformers.BertConfig(
        vocab_size=VOCAB, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32
    )
    decoder = gpt2(add_cross_attention=True, is_decoder=True)
    model = transformers.EncoderDecoderModel(encoder=transformers.BertModel(config), decoder=decoder).eval()
    for settings in (model.config, model.generation_config):
        settings.decoder_start_token_id = settings.pad_token_id = 0
    polymix.convert(model, plan)
    for beams in (1, 3):
        assert torch.equal(
            generate(model, RIGHT, num_beams=beams), generate(model, RIGHT, num_beams=beams, use_cache=False)
        )


# -- graphs


def test_the_state_goes_through_a_graph():
    model, token = converted(partial(llama, num_hidden_layers=1), "pom"), IDS[:, :1]
    more = torch.cat([LEFT, LEFT[:, -1:]], 1)
    torch._dynamo.reset()
    graph = torch.compile(model, fullgraph=True, backend="eager")
    first, same = model(IDS, attention_mask=LEFT), graph(IDS, attention_mask=LEFT)
    then = [run(token, attention_mask=more, past_key_values=output.past_key_values).logits
            for run, output in ((model, first), (graph, same))]  # fmt: skip
    checks.near([same.logits[LEFT.bool()], then[1]], [first.logits[LEFT.bool()], then[0]])


def test_a_graph_fails_where_it_cannot_honour_a_mask():
    adapter, x = converted(gpt2, "pom").transformer.h[0].attn, CONTEXT
    order = torch.ones(BATCH, 1, 5, 5, dtype=torch.bool).tril()
    torch._dynamo.reset()
    graph = torch.compile(adapter, fullgraph=True, backend="eager")
    checks.near([graph(x, attention_mask=order)[0]], [adapter(x, attention_mask=order)[0]])
    order[:, :, 3, 1] = False
    with pytest.raises(RuntimeError, match="takes no mask but of padding"):
        graph(x, attention_mask=order)
    place = torch.arange(5)[None]
    checks.near([graph(x, position_ids=place)[0]], [adapter(x)[0]])
    with pytest.raises(RuntimeError, match="takes no packed sequences"):
        graph(x, position_ids=place % 3)
