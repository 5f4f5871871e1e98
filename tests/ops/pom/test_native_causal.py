"""PoM's causal C kernel against eager code in float64, for any division of the tokens among blocks and threads."""

import ctypes
import math

import pytest
import torch

import polymix
from polymix.ops.pom import PomOptions, PomState, PomWeights, pom_chunk
from polymix.ops.pom.native import causal
from polymix.ops.shared.activations import ACTIVATIONS, GATES
from tests.helpers import build as mixer_of
from tests.helpers import poisoned, tokens
from tests.mixers.impls.cases import of
from tests.mixers.impls.test_choice import refuses
from tests.ops.kernels import error_by_token, needs_it, padding

WIDTHS = [(60, 1), (60, 2), (64, 2)]  # no whole vectors, an odd number of them in a row, whole ones
FLOAT, PERTURB = 3e-6, -6  # the tolerance in float32; glibc's M_PERTURB


def make_mixer(dim=60, dtype=torch.float32, **options):
    return mixer_of("pom", dim, **options).to(dtype)


@torch.no_grad()
def ours_of(mixer, x, mask=None):
    return of(mixer, "native")(x, causal=True, mask=mask)


@torch.no_grad()
def wanted_of(mixer, x, mask=None):
    """The result of eager code in float64 on the same numbers."""
    return of(mixer, "eager").double()(x.double(), causal=True, mask=mask)


def both(mixer, x, mask=None):
    return ours_of(mixer, x, mask), wanted_of(mixer, x, mask)


@pytest.fixture
def fresh_memory_is_poison(monkeypatch):
    """Fill memory that torch allocates with NaN, and memory that C allocates with 3e38."""
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))
    mallopt = getattr(ctypes.CDLL(None), "mallopt", lambda option, value: None)
    mallopt(PERTURB, 0x80)
    yield
    mallopt(PERTURB, 0)


@needs_it
@pytest.mark.usefixtures("fresh_memory_is_poison")
@pytest.mark.parametrize("n", [1, 63, 100, 257, 1000])
@pytest.mark.parametrize("batch", [1, 2, 3])
@pytest.mark.parametrize(("dim", "expand"), WIDTHS)
def test_any_size(n, batch, dim, expand, with_threads):
    mixer, x = make_mixer(dim, expand=expand), tokens(batch, n, dim, dtype=torch.float32)
    for mask in (None, padding(batch, n)):
        expected = wanted_of(mixer, x, mask)
        for threads in with_threads(1, 2, 3):
            ours = ours_of(mixer, x, mask)
            assert (ours.shape, ours.dtype) == (x.shape, x.dtype)
            assert error_by_token(ours, expected) < FLOAT, (
                f"{threads} threads: an edge was left out, or unwritten memory was read"
            )


@needs_it
@pytest.mark.parametrize("activation", list(ACTIVATIONS))
@pytest.mark.parametrize("gate", list(GATES))
@pytest.mark.parametrize("degree", [1, 2, 3])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_every_option(activation, gate, degree, reduction):
    mixer = make_mixer(activation=activation, gate=gate, degree=degree, reduction=reduction, bias=degree != 2)
    x = tokens(2, 257, 60, dtype=torch.float32)
    for mask in (None, padding(2, 257)):
        assert error_by_token(*both(mixer, x, mask)) < 2 * FLOAT, "wrong function or power"


@needs_it
@pytest.mark.parametrize(("batch", "n"), [(40, 5), (7, 130), (4, 300), (0, 9)])
def test_blocks_of_many_samples(batch, n, with_threads):
    """Threads work on blocks of several samples at a time; each sample must start from zero."""
    mixer, x = make_mixer(reduction="sum"), tokens(batch, n, 60, dtype=torch.float32)
    expected = wanted_of(mixer, x)
    for _ in with_threads(1, 2, 3, 5):
        ours = ours_of(mixer, x)
        assert ours.shape == expected.shape and (batch == 0 or error_by_token(ours, expected) < FLOAT), (
            "the sums of one sample reached another"
        )


@needs_it
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize(("n", "cut"), [(3, 1), (130, 1), (257, 100), (600, 300)])
def test_a_chunk_continues_from_a_state(reduction, n, cut):
    """The kernel must continue the sums and counts of a state, and hand on those that eager code would."""
    mixer, x = make_mixer(reduction=reduction), tokens(2, n, 60, dtype=torch.float32)
    exact = of(mixer, "eager").double()
    for mask in (None, padding(2, n)):
        first, rest = (None if mask is None else mask[:, part] for part in (slice(0, cut), slice(cut, None)))
        with torch.no_grad():
            _, kept = exact.prefill(x[:, :cut].double(), mask=first)
            start = PomState(kept.total.float(), kept.count)
            y, state = pom_chunk(x[:, cut:], start, mixer._weights, mixer._options, mask=rest, impl="native")
            expected, end = exact.prefill(x.double(), mask=mask)
        assert error_by_token(y, expected[:, cut:]) < FLOAT, "the sums or the count before were lost"
        assert error_by_token(state.total, end.total) < FLOAT and torch.equal(state.count, end.count)


@needs_it
def test_the_result_does_not_depend_on_the_number_of_threads(with_threads):
    mixer, x, mask = make_mixer(), tokens(3, 1000, 60, dtype=torch.float32), padding(3, 1000)
    results = [torch.cat((ours_of(mixer, x), ours_of(mixer, x, mask))) for _ in with_threads(1, 2, 3, 7, 2, 1)]
    assert all(torch.equal(results[0], other) for other in results[1:]), (
        "the order of the sums depends on the threads, or there is a race"
    )


@needs_it
def test_no_race_between_blocks(with_threads):
    """Many small blocks: without waiting, a block would sometimes read sums that are not written yet."""
    mixer, x = make_mixer(12, expand=1), tokens(1, 3000, 12, dtype=torch.float32)
    first = ours_of(mixer, x)
    for _ in with_threads(2, 3):
        assert all(torch.equal(first, ours_of(mixer, x)) for _ in range(20)), "sums were read before they were written"


@needs_it
@pytest.mark.parametrize("place", [1, 63, 86, 128, 172, 256])
def test_a_later_token_changes_nothing_before_it(place):
    mixer, x = of(make_mixer(), "native"), tokens(2, 257, 60, dtype=torch.float32)
    other = x.clone()
    other[:, place:] = math.nan
    with torch.no_grad():
        ours, whole = mixer(other, causal=True), mixer(x, causal=True)
    assert torch.equal(ours[:, :place], whole[:, :place]), "a token saw one after it"
    assert ours[:, place:].isnan().all(), "a token did not see one before it"


@needs_it
def test_padding_that_holds_nan():
    mixer, x, mask = make_mixer(), tokens(3, 257, 60, dtype=torch.float32), padding(3, 257)
    ours, expected = both(mixer, x.masked_fill(~mask[..., None], math.nan), mask)[0], both(mixer, x, mask)[1]
    assert error_by_token(ours[mask], expected[mask]) < FLOAT, "padding went into a sum"


@needs_it
def test_any_layout():
    """Slices of a wider array, every other token, transposed, not aligned to a vector, one sample for all."""
    mixer, x, mask = make_mixer(), tokens(3, 200, 60, dtype=torch.float32), padding(3, 200)
    layouts = (
        torch.cat((x, x, x), -1)[..., 60:120], x.repeat_interleave(2, 1)[:, ::2],
        x.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1),
        torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape), x[:1].expand(3, -1, -1),
    )  # fmt: skip
    for number, layout in enumerate(layouts):
        before, masks = layout.clone(), mask.t().contiguous().t()
        assert error_by_token(*both(mixer, layout, masks)) < FLOAT, f"layout {number}: wrong tokens were read"
        assert torch.equal(layout, before), "the input was overwritten"


@needs_it
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("dim", [60, 64])
def test_bf16_is_rounded_once_or_twice(reduction, dim, bf16_products):
    """Twice where products are in bf16: what the last map reads is rounded, as plain PyTorch rounds it."""
    mixer, x = make_mixer(dim, torch.bfloat16, reduction=reduction), tokens(2, 300, dim).bfloat16()
    for mask in (None, padding(2, 300)):
        ours, expected = both(mixer, x, mask)
        assert ours.dtype == torch.bfloat16
        atol = (2**-8 if bf16_products else 1e-5) * expected.abs().max().item()
        assert torch.allclose(ours.double(), expected, rtol=2**-8, atol=atol)


@needs_it
def test_sums_over_blocks_are_double():
    """One block of 1e10, six of ones, one of -1e10: in float32, the ones would be lost."""
    x, one, identity = torch.zeros(1, 9 * 128, 1), torch.ones(1), torch.ones(1, 1)
    x[0, 0], x[0, 128 : 7 * 128], x[0, 7 * 128] = 1e10, 1.0, -1e10
    weights = PomWeights((identity, None), (torch.zeros(1, 1), one), (identity, None), identity)
    assert torch.equal(
        causal(x, weights, PomOptions("identity", "identity", "sum"))[0][0, 8 * 128 :], torch.full((128, 1), 768.0)
    ), "sums over blocks are float32"


@needs_it
def test_processors_with_other_vectors(vectors):
    for (dim, expand), n in zip(WIDTHS, (100, 257, 1000), strict=True):
        mixer, x = make_mixer(dim, expand=expand), tokens(2, n, dim, dtype=torch.float32)
        assert error_by_token(*both(mixer, x, padding(2, n))) < FLOAT, "wrong with vectors of fewer than sixteen floats"


@needs_it
def test_when_it_runs():
    mixer, x = make_mixer(), tokens(1, 1000, 60, dtype=torch.float32)
    named = of(mixer, "native")
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert polymix.explain(mixer, x, causal=True)[0].impl == "native", "auto should choose the kernel"
    refuses(named, "native", "no backward", x, causal=True)
    mixer(x.requires_grad_(), causal=True).sum().backward()
    assert x.grad.isfinite().all(), "auto chose an implementation without gradients"
    x, mask = x.detach(), torch.ones(1, 1000, dtype=torch.bool)
    with torch.no_grad():
        square = mask[:, :, None] & mask[:, None]
        for kw in ({"causal": 3}, {"causal": True, "segments": mask.long()}, {"causal": True, "mask": square}):
            refuses(named, "native", "supports .* only", x, **kw)
        for options in ({"groups": 2}, {"rotary": "1d"}, {"selection_heads": 4}):
            refuses(make_mixer(impl="native", **options), "native", "supports .* only", x, causal=True)
