"""Local attention: its definition, softmax's weights, its state, and whatever padding, segments and graphs ask."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.errors import CapabilityError, MaskError, OptionError, StateError
from polymix.mixers.related import LocalState
from tests import references as reference
from tests.helpers import build, close, real_positions, tokens, visible
from tests.mixers.compiled import graphs


def by_definition(mixer, x, mask=None, segments=None):
    batch, n = x.shape[:2]
    turned = {}
    if mixer.config.rotary is not None:
        real = torch.ones(batch, n, dtype=torch.bool) if mask is None else mask
        ids = torch.zeros(batch, n, dtype=torch.int64) if segments is None else segments
        place = [real_positions(*row, n) for row in zip(real.tolist(), ids.tolist(), strict=True)]
        pairs = mixer.width // 2
        turned = {
            "position": torch.tensor(place),
            "frequencies": mixer.config.rotary ** -(torch.arange(pairs, dtype=torch.float64) / pairs),
        }
    see = visible(batch, n, n, mask=mask, causal=1, segments=segments)
    letters = mixer.matrices(n, dtype=torch.float64)
    return reference.local(x, see, mixer.heads, mixer.config.window, **letters, **turned)


FORMS = [{"window": 1}, {"window": 3, "bias": False}, {"window": 4, "rotary": 1e4}, {"rotary": 100.0}, {}]


@pytest.mark.parametrize("n", [1, 3, 4, 11, 12])
@pytest.mark.parametrize("options", FORMS, ids=str)
def test_by_definition(options, n):
    """Plain, with padding anywhere, with segments that stand together or not, and with both."""
    mixer, x = build("local", 12, heads=3, **options), tokens(2, n, 12)
    close(mixer(x), by_definition(mixer, x), 1e-12)
    mask = torch.rand(2, n, generator=torch.Generator().manual_seed(1)) > 0.3
    mask[0, 0] = True
    ids = torch.randint(3, (2, n), generator=torch.Generator().manual_seed(2))
    for see in ({"mask": mask}, {"segments": ids}, {"segments": ids.sort(1)[0]}, {"mask": mask, "segments": ids}):
        real = see.get("mask", torch.ones_like(mask))
        broken = x.masked_fill(~real[..., None], torch.nan)
        close(mixer(broken, **see)[real], by_definition(mixer, x, **see)[real], 1e-12)


def test_within_its_window_it_is_causal_softmax_with_the_same_weights():
    attention = build("softmax", 12, heads=3, rotary=1e4)
    mixer = build("local", 12, heads=3, rotary=1e4, window=9)
    mixer.load_state_dict(attention.state_dict())
    close(mixer(tokens(2, 9, 12)), attention(tokens(2, 9, 12), causal=True), 1e-12)
    x = tokens(2, 12, 12)
    close(mixer(x)[:, :9], attention(x, causal=True)[:, :9], 1e-12)
    assert not torch.allclose(mixer(x)[:, 9:], attention(x, causal=True)[:, 9:], atol=1e-3), "the first token is seen"


@pytest.mark.parametrize("window", [1, 4, 20])
def test_a_token_depends_on_its_window_and_on_nothing_else(window):
    mixer = build("local", 4, window=window)
    jacobian = torch.autograd.functional.jacobian(mixer, tokens(1, 11, 4)).abs().sum((0, 2, 3, 5))
    gap = torch.arange(11)[:, None] - torch.arange(11)
    assert torch.equal(jacobian > 0, (gap >= 0) & (gap < window))


def in_pieces(mixer, x, cuts, mask=None):
    state, out = None, []
    for start, stop in zip([0, *cuts], [*cuts, x.shape[1]], strict=True):
        if start < stop:
            part = None if mask is None else mask[:, start:stop]
            one = stop - start == 1 and part is None
            y, state = mixer.step(x[:, start:stop], state) if one else mixer.prefill(x[:, start:stop], state, mask=part)
            out.append(y)
    return torch.cat(out, 1), state


@given(data=st.data(), n=st.integers(1, 40), window=st.sampled_from([1, 2, 5, 64]), rotary=st.sampled_from([None, 1e4]))
def test_state_law_in_float32(data, n, window, rotary):
    """Any split, with padding anywhere or none, gives the one forward; the state is that of the real tokens alone."""
    mixer = build("local", 8, heads=2, window=window, rotary=rotary).float()
    x = tokens(2, n, 8, seed=n, dtype=torch.float32)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    padded = data.draw(st.booleans())
    rows = data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2))
    mask = torch.tensor(rows) if padded else None
    broken = x.masked_fill(~mask[..., None], torch.nan) if padded else x
    y, state = in_pieces(mixer, broken, cuts, mask)
    close(y, mixer(broken, mask=mask), 1e-5)
    for row in range(2):
        keep = mask[row] if padded else torch.ones(n, dtype=torch.bool)
        assert state.count[row] == keep.sum()
        if keep.any():
            alone, end = mixer.prefill(x[row : row + 1, keep])
            close(y[row : row + 1, keep], alone, 1e-5)
            if window > 1:
                close(state.keys[row : row + 1], end.keys, 1e-5)
                close(state.values[row : row + 1], end.values, 1e-5)


def test_rows_of_padding_alone_are_the_bias_of_the_last_map():
    mixer, mask = build("local", 8, window=3), torch.tensor([[True] * 5, [False] * 5])
    x = tokens(2, 5, 8).masked_fill(~mask[..., None], torch.nan)
    y, state = mixer.prefill(x, mask=mask)
    for out in (y, mixer(x, mask=mask), mixer(x, mask=mask, segments=torch.zeros(2, 5, dtype=torch.int64))):
        close(out[1], mixer.proj.bias.expand(5, -1), 1e-12)
    assert state.count.tolist() == [5, 0]
    assert not state.keys[1].any()
    out.square().sum().backward()
    assert all(p.grad.isfinite().all() for p in mixer.parameters()), "NaN in padding reaches a weight's gradient"


def test_after_a_million_tokens_it_is_as_after_none():
    """The position of the first token plays no part, once what came before it has left the window."""
    mixer, x = build("local", 12, heads=3, window=5, rotary=1e4).float(), tokens(1, 15, 12, dtype=torch.float32)
    before = torch.randn(1, 4, 3, 4)
    y, state = mixer.prefill(x, LocalState(before, before, torch.tensor([1_000_000])))
    close(y[:, 4:], mixer(x)[:, 4:], 1e-5)
    assert state.count.item() == 1_000_015


def test_a_step_costs_the_same_after_any_number_of_tokens():
    mixer, found = build("local", 8, window=6), []
    for n in (1, 5, 300):
        _, state = mixer.prefill(tokens(2, n, 8))
        with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH), torch.no_grad():
            mixer.step(tokens(2, 8), state)
        found.append((counter.get_total_flops(), sum(part.numel() for part in state)))
    assert len(set(found)) == 1, found


def test_a_step_leaves_the_state_that_it_was_given():
    """Branches of a search go on from one state; beams are reordered along the first axis of every tensor."""
    mixer, x = build("local", 8, window=3), tokens(3, 7, 8)
    _, state = mixer.prefill(x)
    copies = [part.clone() for part in state]
    mixer.step(x[:, 0], state)
    assert all(map(torch.equal, state, copies))
    beams = torch.tensor([2, 0, 0])
    y, _ = mixer.step(x[beams, 1], LocalState(*(part.index_select(0, beams) for part in state)))
    close(y, mixer(torch.cat((x, x[:, 1:2]), 1)[beams])[:, -1], 1e-12)


@pytest.mark.slow
def test_one_graph_for_every_length_of_padded_and_packed_sequences():
    """Shorter than a window, and several long."""
    calls = []
    for n in (13, 7, 45):
        place = torch.arange(n).expand(2, n).clone()
        call = {"mask": place % 4 > 0, "segments": place // 5}
        calls.append((tokens(2, n, 12, dtype=torch.float32).requires_grad_(), call))
    count = graphs(build("local", 12, heads=3, window=8, rotary=1e4).float(), calls)
    assert len(set(count)) == 1, "a new length must not compile again"


@pytest.mark.slow
@torch.no_grad()
def test_prefill_and_step_compile_without_breaks():
    torch._dynamo.reset()
    mixer = build("local", 12, heads=3, window=8, rotary=1e4).float()
    prefill, step = (torch.compile(f, fullgraph=True, backend="aot_eager") for f in (mixer.prefill, mixer.step))
    state = ours = None
    for n in (13, 9, 30):
        x = tokens(2, n, 12, seed=n, dtype=torch.float32)
        torch._dynamo.mark_dynamic(x, 1)
        (y, ours), (expected, state) = prefill(x, ours), mixer.prefill(x, state)
        close(y, expected, 1e-5)
    for seed in range(3):
        x = tokens(2, 12, seed=seed, dtype=torch.float32)
        (y, ours), (expected, state) = step(x, ours), mixer.step(x, state)
        close(y, expected, 1e-5)
    close(ours.keys, state.keys, 1e-5)


def test_autocast_keeps_the_state_in_float32():
    mixer, x = build("local", 12, heads=3, window=4).float(), tokens(2, 11, 12, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y, state = in_pieces(mixer, x, [3, 8, 9])
    assert y.dtype == torch.bfloat16
    assert state.keys.dtype == state.values.dtype == torch.float32
    close(y.float(), mixer(x), 0.05)


def test_an_empty_batch_has_gradients():
    for n in (3, 12):
        mixer = build("local", 8, window=4)
        mixer(tokens(0, n, 8)).sum().backward()
        assert all(not p.grad.any() for p in mixer.parameters())


@pytest.mark.parametrize(("options", "argument"), [
    ({"window": 0}, "window"), ({"window": 2.5}, "window"), ({"window": True}, "window"), ({"window": None}, "window"),
    ({"rotary": 0.5}, "rotary"), ({"rotary": "1d"}, "rotary"), ({"heads": 4, "rotary": 1e4}, "rotary"),
    ({"heads": 0}, "heads"), ({"heads": 5}, "heads"), ({"heads": 1.5}, "heads"),
])  # fmt: skip
def test_options(options, argument):
    with pytest.raises(OptionError, match=argument):
        polymix.create_mixer("local", 12, **options)


def test_what_it_cannot_do():
    mixer, x = build("local", 8, window=3), tokens(2, 5, 8)
    for error, call in (
        (CapabilityError, {"context": x}), (CapabilityError, {"mask": torch.ones(2, 5, 5, dtype=torch.bool)}),
        (MaskError, {"causal": False}), (MaskError, {"causal": 2}),
    ):  # fmt: skip
        with pytest.raises(error):
            mixer(x, **call)


def test_a_state_of_another_mixer_is_refused():
    mixer, x = build("local", 8, window=3), tokens(2, 5, 8)
    _, state = mixer.prefill(x)
    others = build("local", 8, window=4).prefill(x)[1], build("local", 8, window=3, heads=2).prefill(x)[1]
    for wrong in (state[:2], (1, 2, 3), *others, LocalState(state.keys, state.values, state.count[:1])):
        with pytest.raises(StateError, match="LocalState"):
            mixer.step(x[:, 0], wrong)
