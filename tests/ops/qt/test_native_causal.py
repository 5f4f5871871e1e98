"""QT's causal C kernel against eager code in float64, for any division of the tokens among blocks and threads."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymix
from polymix.ops.native import library
from polymix.ops.qt import qt_chunk
from polymix.ops.qt.native import causal
from tests.helpers import build as mixer_of
from tests.helpers import slow_but, tokens
from tests.mixers.impls.cases import of
from tests.mixers.impls.test_choice import refuses
from tests.ops.kernels import error_by_token, needs_it, padding, relative_error

WIDTHS = [(48, 3), (60, 3), (128, 2), (192, 2), (20, 1), (3, 3)]  # channels and heads: whole vectors, and parts of them
FLOAT = 3e-6  # the tolerance in float32
pytestmark = needs_it


def make_mixer(dim=60, heads=3, dtype=torch.float32, **options):
    """A mixer whose denominators are not near zero, where rounding would be magnified without bound."""
    mixer = mixer_of("qt", dim, heads=heads, **options)
    with torch.no_grad():
        maps = mixer.qkv.qkv.weight[: 2 * dim]
        maps /= 2 * maps.norm(dim=1, keepdim=True)
        mixer.scale[2] = 1.5
    return mixer.to(dtype)


@torch.no_grad()
def chunk(mixer, impl, x, state=None, mask=None):
    """The output and the state of one implementation."""
    return qt_chunk(x, state, mixer._weights, mixer._options, mask=mask, impl=impl)


def agree(mixer, x, mask=None, cut=0, tolerance=FLOAT):
    """In one chunk, or in two: the kernel must continue from a state, and hand on the one that eager code would."""
    exact = mixer.double() if mixer.scale.dtype == torch.float64 else of(mixer, "eager").double()
    expected, end = chunk(exact, "eager", x.double(), mask=mask)
    state, parts = None, []
    for part in (slice(0, cut), slice(cut, None)) if cut else (slice(None),):
        y, state = chunk(mixer, "native", x[:, part], state, None if mask is None else mask[:, part])
        assert y.shape == x[:, part].shape and y.dtype == x.dtype
        parts.append(y)
    seen = slice(None) if mask is None else mask.cumsum(1) > 0  # a token that sees none is a quotient of zeros
    assert error_by_token(torch.cat(parts, 1)[seen], expected[seen]) < tolerance, "wrong outputs"
    assert relative_error(state.moments, end.moments) < tolerance, "wrong moments are handed on"
    assert torch.equal(state.count, end.count)


@pytest.mark.parametrize("n", slow_but([1, 49, 257], [1, 47, 49, 100, 129, 257, 700]))
@pytest.mark.parametrize(("dim", "heads"), WIDTHS)
@pytest.mark.parametrize("order", [1, 2])
def test_any_size(n, dim, heads, order, fresh_memory_is_nan, with_threads):
    mixer, batch = make_mixer(dim, heads, order=order, bias=n != 100), 1 + n % 3
    x = tokens(batch, n, dim, dtype=torch.float32)
    for mask in (None, padding(batch, n)):
        for _ in with_threads(1, 2, 3):
            agree(mixer, x, mask, cut=n // 3)


@given(st.data())
def test_random_calls(data):
    heads, each = data.draw(st.integers(1, 4)), data.draw(st.integers(1, 40))
    batch, n = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 400))
    mixer = make_mixer(heads * each, heads, order=data.draw(st.sampled_from((1, 2))), bias=data.draw(st.booleans()))
    x = tokens(batch, n, heads * each, seed=data.draw(st.integers(0, 9)), dtype=torch.float32)
    mask = tokens(batch, n, seed=3) < data.draw(st.sampled_from((-9.0, 0.5))) if data.draw(st.booleans()) else None
    agree(mixer, x, mask, cut=data.draw(st.integers(0, n - 1)))


def test_the_result_does_not_depend_on_the_number_of_threads(with_threads):
    mixer, x, mask = make_mixer(), tokens(3, 1000, 60, dtype=torch.float32), padding(3, 1000)
    results = [chunk(mixer, "native", x, mask=mask) for _ in with_threads(1, 2, 3, 7, 2, 1)]
    for y, state in results[1:]:
        assert torch.equal(y, results[0][0]) and torch.equal(state.moments, results[0][1].moments), (
            "the order of the sums depends on the threads, or there is a race"
        )


def test_no_race_between_blocks(with_threads):
    """Many small blocks: without waiting, a block would sometimes read sums that are not written yet."""
    mixer, x = make_mixer(12, 3), tokens(1, 3000, 12, dtype=torch.float32)
    first = chunk(mixer, "native", x)[0]
    for _ in with_threads(2, 3):
        assert all(torch.equal(first, chunk(mixer, "native", x)[0]) for _ in range(20)), "sums were read too early"


@pytest.mark.parametrize(("batch", "n"), [(40, 5), (7, 130), (0, 9)])
def test_blocks_of_many_samples(batch, n, with_threads):
    mixer, x = make_mixer(), tokens(batch, n, 60, dtype=torch.float32)
    for _ in with_threads(1, 2, 5):
        agree(mixer, x, cut=n // 2)


@pytest.mark.parametrize("place", [1, 47, 86, 128, 172, 256])
def test_a_later_token_changes_nothing_before_it(place):
    mixer, x = make_mixer(), tokens(2, 257, 60, dtype=torch.float32)
    other = x.clone()
    other[:, place] += 100.0
    ours, whole = chunk(mixer, "native", other)[0], chunk(mixer, "native", x)[0]
    assert torch.equal(ours[:, :place], whole[:, :place]), "a token saw one after it"
    assert (ours[:, place:] != whole[:, place:]).any(-1).all(), "a token did not see one before it"


def test_padding_that_holds_nan():
    mixer, x, mask = make_mixer(), tokens(3, 257, 60, dtype=torch.float32), padding(3, 257)
    (expected, end), (ours, state) = (
        chunk(mixer, "native", tokens_, mask=mask) for tokens_ in (x, x.masked_fill(~mask[..., None], math.nan))
    )
    assert torch.equal(ours[mask], expected[mask]) and torch.equal(state.moments, end.moments), "padding was summed"


def test_any_layout():
    """Slices of a wider array, every other token, transposed, not aligned to a vector, one sample for all."""
    mixer, x = make_mixer(), tokens(3, 200, 60, dtype=torch.float32)
    for layout in (
        torch.cat((x, x, x), -1)[..., 60:120], x.repeat_interleave(2, 1)[:, ::2],
        x.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape), x[:1].expand(3, -1, -1),
    ):  # fmt: skip
        before = layout.clone()
        agree(mixer, layout, padding(3, 200).t().contiguous().t(), cut=80)
        assert torch.equal(layout, before), "the input was overwritten"


@pytest.mark.parametrize("dim", [60, 192])
def test_bf16_is_as_exact_as_pytorch(dim, bf16_products):
    mixer, x = make_mixer(dim, dtype=torch.bfloat16), tokens(2, 300, dim).bfloat16()
    exact = of(mixer, "eager").double()
    for mask in (None, padding(2, 300)):
        want, end = chunk(exact, "eager", x.double(), mask=mask)
        (ours, state), (plain, _) = (chunk(mixer, impl, x, mask=mask) for impl in ("native", "eager"))
        seen = slice(None) if mask is None else mask.cumsum(1) > 0
        error, allowed = (error_by_token(y[seen], want[seen]) for y in (ours, plain))
        assert ours.dtype == torch.bfloat16 and error <= max(1.5 * allowed, 2**-8), f"{error:.1e} > {allowed:.1e}"
        assert state.moments.dtype == torch.float32 and relative_error(state.moments, end.moments) < 2**-8


def test_sums_over_blocks_are_double():
    """One value of 1e9, six blocks of ones, one value of -1e9: in float32 sums, the ones would be lost."""
    x, one = torch.zeros(1, 9 * 128, 1), torch.ones(1, 1)
    x[0, 0], x[0, 128 : 7 * 128], x[0, 7 * 128] = 1e9, 1.0, -1e9
    nothing = torch.tensor([[[[0.0]]], [[[0.0]]], [[[1.0]]]])  # φ(x) = [1, 0]: the mean of the values
    qkv = torch.cat((0 * one, 0 * one, one))
    seen = torch.arange(1, x.shape[1] + 1)[None]
    y, end = causal(x, (qkv, None), (one, None), nothing, None, 1, 1, seen, None)
    assert end[0, 0, 0].tolist() == [768.0, 1152.0]
    assert torch.allclose(y[0, -1], torch.tensor(768 / 1152)), "sums over blocks are float32"


def test_processors_with_other_vectors(vectors):
    for (dim, heads), n in zip(WIDTHS, (100, 257, 130, 49, 300, 60), strict=True):
        for order in (1, 2):
            agree(make_mixer(dim, heads, order=order), tokens(2, n, dim, dtype=torch.float32), padding(2, n), cut=20)


def test_memory_does_not_grow_with_the_tokens(with_threads):
    """No sum, query, key or value of a token is stored: beyond the output, as much memory for 512 tokens as for 8,192."""
    for name in ("qt", "pom"):
        mixer, sizes = of(mixer_of(name, 64), "native").float(), set()
        for n in (512, 8192):
            for _ in with_threads(2):
                with torch.no_grad():
                    mixer(tokens(1, n, 64, dtype=torch.float32), causal=True)
                sizes.add(library.scratch_bytes())
        assert len(sizes) == 1, name


def test_decoding_after_a_prompt():
    """The prompt runs in C, the tokens after it do not; both must agree on the state."""
    mixer, x = make_mixer(), tokens(2, 203, 60, dtype=torch.float32)
    exact = of(mixer, "eager").double()
    with torch.inference_mode():
        assert polymix.explain(mixer, x, causal=True)[0].impl == "native", "auto should choose the kernel"
        expected = exact(x.double(), causal=True)
        y, state = mixer.prefill(x[:, :200])
        for i in range(200, 203):
            y, state = mixer.step(x[:, i], state)
            assert error_by_token(y, expected[:, i]) < FLOAT


def test_when_it_runs():
    mixer, x = make_mixer(), tokens(1, 1000, 60, dtype=torch.float32)
    named = of(mixer, "native")
    refuses(named, "native", "no backward", x, causal=True)
    mixer(x.requires_grad_(), causal=True).sum().backward()
    assert x.grad.isfinite().all(), "auto chose an implementation without gradients"
    x = x.detach()
    with torch.no_grad():
        assert polymix.explain(mixer, x.view(50, 20, 60), causal=True)[0].impl == "eager", "too few tokens in each"
        refuses(named, "native", "from the same tokens", x, values=x + 1, causal=True)
        for options in ({"form": "full"}, {"order": 0}):
            refuses(mixer_of("qt", 60, impl="native", **options).float(), "native", "order 1 or 2", x, causal=True)


def test_a_compiled_graph_runs_eager_code():
    mixer, x = make_mixer(), tokens(1, 256, 60, dtype=torch.float32)
    compiled = torch.compile(lambda x: mixer(x, causal=True), backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.allclose(compiled(x), mixer(x, causal=True), atol=1e-5)
