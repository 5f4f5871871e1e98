"""GPT-2 and Llama with mixers for attention: generation from the mixers' states, and the cache that holds them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch.utils._pytree import tree_leaves

from polymix import errors
from tests.convert import checks
from tests.convert.language_hosts import (
    BATCH,
    CACHED,
    HOLES,
    HOSTS,
    IDS,
    LEFT,
    RIGHT,
    TOKENS,
    converted,
    generate,
    given,
    gpt2,
    llama,
    transformers,
)

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


@pytest.mark.parametrize(("plan", "options"), CACHED, ids=str)
@pytest.mark.parametrize("host", HOSTS.values(), ids=HOSTS)
def test_generation_from_the_cache_is_generation_without(host, plan, options):
    model = converted(host, plan, **options)
    for beams in (1, 3):  # beams change their places in the cache
        generated = generate(model, num_beams=beams)
        assert torch.equal(generated, generate(model, num_beams=beams, use_cache=False))
    generated = generate(model)[:, TOKENS:]
    assert len(set(generated.flatten().tolist())) > 2, "too dull a model to tell anything"
    alone = [generate(model, None, IDS[i : i + 1, LEFT[i].bool()])[0, -7:] for i in range(BATCH)]
    assert torch.equal(torch.stack(alone), generated), "what a row is padded with plays a part"
    assert torch.equal(generate(model, prefill_chunk_size=4)[:, TOKENS:], generated)


@pytest.mark.parametrize(("plan", "options"), CACHED, ids=str)
def test_any_split_into_calls_gives_the_logits_of_one(plan, options):
    hybrid = plan == "1:1" or isinstance(plan, dict)  # flash attention has no kernel here for what was kept
    for host, impl in ((gpt2, "sdpa"), (llama, "eager"), (llama, "sdpa" if hybrid else "flash_attention_2")):
        model = converted(host, plan, **options)
        model.config._attn_implementation = impl
        for mask in (None, LEFT, RIGHT, HOLES):
            whole = model(**given(attention_mask=mask)).logits
            tokens = slice(None) if mask is None else mask.bool()
            for splits in ((4, 9), (1, 2, 8, 9)):
                cache, parts, first = None, [], 0
                for last in splits:
                    seen = None if mask is None else mask[:, :last]
                    output = model(IDS[:, first:last], attention_mask=seen, past_key_values=cache, use_cache=True)
                    cache, first = output.past_key_values, last
                    parts.append(output.logits)
                    assert cache.get_seq_length() == last
                checks.near([torch.cat(parts, 1)[tokens]], [whole[tokens]])


def test_the_cache_does_not_grow():
    model = converted(gpt2, "pom")
    cache = model(IDS).past_key_values
    size = sum(t.nbytes for layer in cache.layers for t in tree_leaves(layer.state))
    for token in IDS.t():
        model(token[:, None], past_key_values=cache)
    assert sum(t.nbytes for layer in cache.layers for t in tree_leaves(layer.state)) == size
    assert cache.get_seq_length() == 2 * TOKENS


def test_the_cache_selects_repeats_resets_and_copies():
    model, token = converted(llama, "padre"), IDS[:, :1]
    whole = model(token, past_key_values=model(IDS).past_key_values).logits
    cache = model(IDS).past_key_values
    twin = copy.deepcopy(cache)
    cache.batch_select_indices(torch.tensor([2, 0]))
    checks.near([model(token[[2, 0]], past_key_values=cache).logits], [whole[[2, 0]]])
    checks.near([model(token, past_key_values=twin).logits], [whole])
    twin.reset()
    assert twin.get_seq_length() == 0
    checks.near([model(IDS, past_key_values=twin).logits], [model(**given()).logits])
    lone = model(IDS[:1]).past_key_values
    lone.batch_repeat_interleave(2)
    checks.near([model(token[[0, 0]], past_key_values=lone).logits], [whole[[0, 0]]])
    lazy = transformers.DynamicCache()  # layers come as they are asked for
    model(IDS, past_key_values=lazy)
    checks.near([model(token, past_key_values=lazy).logits], [whole])


def test_the_cache_is_not_cut_back():
    model = converted(gpt2, "pom")
    cache = model(IDS).past_key_values
    cache.crop(0)
    with pytest.raises(errors.CapabilityError, match=r"crop.*no assistant_model"):
        cache.crop(-1)
    assert not cache.is_croppable
    with pytest.raises(errors.CapabilityError, match="crop"):
        generate(model, None, IDS[:1], assistant_model=gpt2())


def test_a_mixer_without_a_state_runs_with_an_empty_cache_and_not_with_a_filled_one():
    for plan in ("softmax", {"*.1.*": "softmax"}):  # the layer that counts first may be the attention
        model = converted(gpt2, plan)
        first = model(IDS)
        checks.near([first.logits], [model(**given()).logits])
        with pytest.raises(errors.CapabilityError, match=r"pom.*continuing after 9 cached tokens.*use_cache=False"):
            model(IDS[:, :1], past_key_values=first.past_key_values)
        with pytest.raises(errors.CapabilityError, match="use_cache=False"):
            generate(model)
        assert generate(model, use_cache=False).shape == (BATCH, TOKENS + 7)


def test_caches_of_others_raise():
    model, host, token = converted(gpt2, "pom"), gpt2(), IDS[:, :1]
    with pytest.raises(errors.StateError, match="keys and values of 9 tokens"):
        model(token, past_key_values=host(IDS).past_key_values)
    with pytest.raises(errors.StateError, match="a cache with a mixer's state in this layer"):
        host(token, past_key_values=model(IDS).past_key_values)
    with pytest.raises(errors.StateError, match="a QtState"):
        converted(gpt2, "qt")(token, past_key_values=model(IDS).past_key_values)
    with pytest.raises(errors.StateError, match="total"):
        model(token[:1], past_key_values=model(IDS).past_key_values)
    with pytest.raises(errors.CapabilityError, match=r"StaticCache of fixed length.*Leave cache_implementation out"):
        generate(model, cache_implementation="static")


def test_a_state_neither_forgets_nor_remembers_on_demand():
    model, token = converted(gpt2, "pom"), IDS[:, :1]
    more = torch.cat([LEFT, LEFT[:, -1:]], 1)
    filled = model(IDS, attention_mask=LEFT).past_key_values
    model(token, attention_mask=more, past_key_values=copy.deepcopy(filled))
    for mask in (None, torch.ones_like(more), more * (torch.arange(TOKENS + 1) != 6)):
        with pytest.raises(errors.MaskError, match="other earlier tokens"):
            model(token, attention_mask=mask, past_key_values=copy.deepcopy(filled))
