"""The state law of whole models: chunks and steps after a cache, padding, packed sequences."""

import copy
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from polymix import errors
from polymix.mixers.cache import StateLayer
from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM
from polymix.models.language.layout import tokens_in
from tests.models.tiny import IDS, LEFT, MIXERS, SHAPES, STATES, VOCAB, alone, error, fresh, tiny, transformers

TOL = 1e-5
PACKED = torch.tensor([[4, 4, 4, 1, 1, 7, 7, 7, 7, 7, 2, 2]]).expand(3, -1)
RESTART = torch.tensor([[0, 1, 2, 0, 1, 0, 1, 2, 3, 4, 0, 1]])


@pytest.fixture(autouse=True)
def _without_gradients():
    with torch.no_grad():
        yield


def chunked(model, ids, sizes, mask=None):
    """The logits of ids cut into chunks, each after the cache of those before, and the cache."""
    cache, logits, seen = None, [], 0
    for chunk in ids.split(sizes, dim=1):
        seen += chunk.shape[1]
        out = model(chunk, None if mask is None else mask[:, :seen], past_key_values=cache, use_cache=True)
        cache = out.past_key_values
        logits.append(out.logits)
    return torch.cat(logits, dim=1), cache


@st.composite
def calls(draw):
    """A shape, ids (2, N), a padding mask or None, and the sizes of the chunks."""
    n = draw(st.integers(2, 14))
    ids = torch.tensor(draw(st.lists(st.integers(0, VOCAB - 1), min_size=2 * n, max_size=2 * n))).view(2, n)
    cuts = sorted(draw(st.sets(st.integers(1, n - 1), max_size=4)))
    sizes = [b - a for a, b in zip([0, *cuts], [*cuts, n], strict=True)]
    side = draw(st.sampled_from(["none", "left", "right", "both"]))
    mask = torch.ones(2, n, dtype=torch.long)
    for row in mask:
        pad = draw(st.integers(0, n - 1)) if side != "none" else 0
        front = {"left": pad, "right": 0, "none": 0, "both": pad // 2}[side]
        row[:front] = 0
        row[n - (pad - front) :] = 0
    return draw(st.sampled_from(list(SHAPES))), ids, None if side == "none" else mask, sizes


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=12)
@given(call=calls())
def test_chunks_and_steps_give_one_forward_and_padding_changes_nothing(name, call):
    shape, ids, mask, sizes = call
    model, steps = tiny(name, shape), ids[:, :2]
    real = torch.ones_like(ids) if mask is None else mask
    whole, more = torch.cat((ids, steps), 1), torch.cat((real, torch.ones_like(steps)), 1)
    expected = alone(model, whole, more)
    parts, cache = chunked(model, whole, [*sizes, 1, 1], None if mask is None else more)
    for got in (model(whole, None if mask is None else more, use_cache=False).logits, parts):
        assert got.isfinite().all(), "padding made a token that is not finite"
        for row, keep, one in zip(got, more.bool(), expected, strict=True):
            assert error(row[keep], one) <= TOL
    assert cache.get_seq_length() == whole.shape[1]


@pytest.mark.parametrize("name", MIXERS)
def test_a_row_that_is_padding_alone_is_finite_and_may_begin_later(name):
    model, mask = tiny(name, "llama"), LEFT.clone()
    mask[1] = 0
    out = model(IDS, mask)
    assert out.logits.isfinite().all()
    more = torch.cat((mask, torch.ones(3, 1, dtype=torch.long)), 1)
    later = model(IDS[:, :1], more, past_key_values=out.past_key_values).logits[1]
    assert error(later, model(IDS[1:2, :1]).logits[0]) <= TOL


@pytest.mark.parametrize("name", MIXERS)
def test_the_cache_costs_bf16_no_more_than_its_own_error(name):
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (4, 40))
    model = tiny(name, "llama" if len(name) % 2 else "gpt-none")
    low = copy.deepcopy(model).bfloat16()
    exact = copy.deepcopy(low).double()(ids).logits
    plain = error(low(ids, use_cache=False).logits, exact)
    parts, _ = chunked(low, ids, [17, 1, 1, 9, 8, 1, 1, 1, 1])
    assert plain < 0.1
    assert error(parts, exact) <= 2 * plain


@pytest.mark.parametrize("name", MIXERS)
def test_what_came_before_counts_and_what_comes_after_does_not(name):
    model, other = tiny(name, "gpt"), IDS.clone()
    other[:, 5] = (other[:, 5] + 7) % VOCAB
    change = (model(IDS).logits - model(other).logits).abs().amax((0, 2))
    assert change[:5].max() == 0, "a token sees what comes after it"
    assert change[6:8].min() > 1e-4, "a token does not see what came before it"


@pytest.mark.parametrize("name", STATES)
def test_a_state_does_not_grow(name):
    model = tiny(name, "gpt-none")
    sizes = []
    for n in (1, 50):
        cache = model(torch.arange(n)[None], use_cache=True).past_key_values
        assert all(isinstance(layer, StateLayer) for layer in cache.layers)
        sizes.append([t.nbytes for layer in cache.layers for t in torch.utils._pytree.tree_leaves(layer.state)
                      if isinstance(t, torch.Tensor)])  # fmt: skip
    assert sizes[0] == sizes[1] and sum(sizes[0])


# -- packed sequences


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", MIXERS)
def test_packed_sequences_are_as_rows_of_their_own(name, shape):
    model = tiny(name, shape)
    apart = torch.cat([model(part).logits for part in IDS.split([3, 2, 5, 2], 1)], 1)
    out = model(IDS, segment_ids=PACKED)
    assert error(out.logits, apart) <= TOL
    assert out.past_key_values is None, "a state of several sequences was handed out"
    assert error(model(IDS, position_ids=RESTART).logits, apart) <= TOL
    assert error(model(IDS, position_ids=RESTART, segment_ids=PACKED).logits, apart) <= TOL
    mixed = torch.tensor([0, 1, 0, 1, 1, 0, 2, 1, 0, 2, 2, 0])  # interleaved, which ids allow
    got = model(IDS, segment_ids=mixed.expand(3, -1)).logits
    for part in range(3):
        assert error(got[:, mixed == part], model(IDS[:, mixed == part]).logits) <= TOL
    assert error(model(IDS, position_ids=torch.arange(12)[None]).logits, model(IDS).logits) <= TOL


@pytest.mark.parametrize("name", MIXERS)
def test_packed_sequences_beside_padding(name):
    model = tiny(name, "llama")
    got = model(IDS, LEFT, segment_ids=PACKED).logits
    for row in range(3):
        for part in PACKED[0].unique():
            keep = (PACKED[row] == part) & LEFT[row].bool()
            if keep.any():
                assert error(got[row, keep], model(IDS[row, keep][None]).logits[0]) <= TOL


def test_packed_sequences_beside_a_cache_raise():
    for name in ("pom", "softmax"):
        model = tiny(name)
        cache = model(IDS).past_key_values
        for given_ids in ({"segment_ids": PACKED}, {"position_ids": RESTART}):
            with pytest.raises(errors.MaskError, match="a cache beside packed sequences"):
                model(IDS, past_key_values=transformers.DynamicCache(), **given_ids)
            with pytest.raises(errors.MaskError, match="packed sequences"):
                model(IDS, use_cache=True, **given_ids)
        with pytest.raises(errors.MaskError, match="packed sequences after 12 cached tokens"):
            model(IDS, past_key_values=cache, segment_ids=PACKED)


# -- caches that are changed, foreign, or of the wrong kind


@pytest.mark.parametrize("name", MIXERS)
def test_a_cache_is_reordered_repeated_and_selected(name):
    model = tiny(name, "llama")
    order = torch.tensor([2, 0, 0])
    changes = {
        "reorder_cache": (order, order), "batch_repeat_interleave": (2, torch.arange(3).repeat_interleave(2)),
        "batch_select_indices": (order[:2], order[:2]),
    }  # fmt: skip
    for change, (argument, rows) in changes.items():
        cache = model(IDS, LEFT).past_key_values
        getattr(cache, change)(argument)
        mask = torch.cat((LEFT, torch.ones(3, 1, dtype=torch.long)), 1)[rows]
        got = model(IDS[rows, :1], mask, past_key_values=cache).logits
        expected = alone(model, torch.cat((IDS, IDS[:, :1]), 1)[rows], mask)
        assert error(got[:, -1], torch.stack([row[-1] for row in expected])) <= TOL, change


def test_a_state_cannot_be_cropped_and_says_so():
    cache = tiny("pom")(IDS).past_key_values
    with pytest.raises(errors.CapabilityError, match=r"only grows.*crop.*no assistant_model"):
        cache.crop(-1)
    cache = tiny("softmax")(IDS).past_key_values
    cache.crop(-1)
    assert cache.get_seq_length() == 11


@pytest.mark.parametrize(
    ("of", "to"),
    [("pom", "padre-2"), ("pom", "softmax"), ("softmax", "pom"), ("pom-softmax", "softmax-pom"), ("pom", "pom-local"),
     ("linear", "qt"), ("mamba", "hydra"), ("local", "pom-local")],
)  # fmt: skip
def test_a_cache_of_another_model_raises(of, to):
    cache = tiny(of).forward(IDS).past_key_values
    with pytest.raises((errors.StateError, errors.CapabilityError)):
        tiny(to)(IDS[:, :1], past_key_values=cache)


@pytest.mark.parametrize("mixer", ["pom", "softmax"])
@pytest.mark.parametrize(("of", "to"), [(1, 2), (2, 1)])
def test_a_cache_of_a_model_with_more_or_fewer_layers_raises(mixer, of, to):
    cache = fresh(mixer, num_layers=of).eval()(IDS).past_key_values
    with pytest.raises(errors.StateError, match="layer"):
        fresh(mixer, num_layers=to).eval()(IDS[:, :1], past_key_values=cache)


def test_a_cache_whose_first_tensors_are_empty_is_taken():
    """As transformers' quantised one, which keeps its numbers elsewhere: nothing tells its rows."""
    cache = transformers.DynamicCache()
    cache.layers = [SimpleNamespace(keys=torch.tensor([]), get_seq_length=lambda: 4) for _ in range(2)]
    assert tokens_in(cache, 2, 3) == 4


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("options", [{}, {"short_conv": 4}])
@pytest.mark.parametrize("mixer", ["pom", "padre", "mamba", "local", "softmax", "linear_floor"])
def test_a_cache_of_another_batch_raises(mixer, options, rows):
    """Also of one row, which attention and a convolution would broadcast."""
    model = fresh(mixer, **options).eval()
    for held, more in ((IDS, IDS[:rows]), (IDS[:rows], IDS)):
        cache = model(held).past_key_values
        with pytest.raises(errors.StateError, match=rf"{len(held)} rows for {len(more)} rows"):
            model(more[:, :1], past_key_values=cache)


def test_no_cache_at_all_raises():
    for wrong in ((), [None], {"state": 1}):
        with pytest.raises(errors.StateError, match=r"past_key_values.*DynamicCache"):
            tiny("pom")(IDS, past_key_values=wrong)


def test_a_mask_that_shows_other_earlier_tokens_raises():
    cache = tiny("pom")(IDS).past_key_values
    mask = torch.cat((LEFT, torch.ones(3, 1, dtype=torch.long)), 1)
    with pytest.raises(errors.MaskError, match="other earlier tokens"):
        tiny("pom")(IDS[:, :1], mask, past_key_values=cache)


@pytest.mark.parametrize("shape", [(3, 5), (3, 1, 12, 12), (3, 12, 12), (1, 12)])
def test_a_mask_of_another_shape_raises(shape):
    with pytest.raises(errors.MaskError, match=r"attention_mask.*\(3, 12\)"):
        tiny("pom")(IDS, torch.ones(shape))


def test_attentions_cache_does_not_copy_the_tokens_before_a_new_one():
    """A step of decoding would otherwise write the whole cache again. Beams and grown buffers keep every value."""
    torch.manual_seed(0)
    options = {"vocab_size": 30, "hidden_size": 16, "num_layers": 2, "num_heads": 2, "mixers": ["softmax", "pom"]}
    model, ids = PolymixGPTForCausalLM(PolymixGPTConfig(**options)).eval(), torch.randint(30, (2, 90))
    with torch.no_grad():
        cache = model(ids[:, :4], use_cache=True).past_key_values
        before, moved, steps = cache.layers[0].keys.data_ptr(), 0, []
        for i in range(4, 90):
            steps.append(model(ids[:, i : i + 1], past_key_values=cache).logits)
            moved += cache.layers[0].keys.data_ptr() != before
            before = cache.layers[0].keys.data_ptr()
        assert moved == 1, "the buffer of 69 tokens is replaced once"
        torch.testing.assert_close(torch.cat(steps, 1), model(ids).logits[:, 4:], rtol=1e-4, atol=1e-5)
        other = copy.deepcopy(cache)
        cache.reorder_cache(torch.tensor([1, 0]))
        swapped = model(ids.flip(0)[:, :1], past_key_values=cache).logits
        output = model(ids[:, :1], past_key_values=other).logits
    torch.testing.assert_close(swapped, output.flip(0))
    with torch.inference_mode():
        cache = model(ids[:, :4], use_cache=True).past_key_values
    with torch.no_grad():
        after = model(ids[:, 4:5], past_key_values=cache).logits
    torch.testing.assert_close(after, steps[0], rtol=1e-4, atol=1e-5)
