"""QT's C kernels, `pool` and `spread`, against the definition in float64."""

import pytest
import torch

from polymix.ops.qt import qt_pool, qt_spread
from tests.helpers import build as mixer_of
from tests.helpers import tokens
from tests.mixers.impls.cases import of
from tests.ops.kernels import needs_it, relative_error

SHAPES = {  # batch, tokens, channels, heads
    "one token": (1, 1, 48, 3), "half a vector left": (2, 63, 60, 3), "a block": (3, 100, 48, 3), "odd": (1, 257, 60, 3),
    "samples that threads share": (3, 257, 48, 3), "wide heads": (1, 257, 128, 2), "one head": (2, 129, 20, 1),
    "heads of one channel": (1, 70, 3, 3), "sums of sums": (2, 4229, 16, 1),
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", list(SHAPES))
every_order = pytest.mark.parametrize("order", [0, 1, 2])


def pooling(batch, n, dim, heads, order, *, bias=True, mask=True, dtype=torch.float32):
    """Arguments of qt_pool; with a mask, the last sample has no real token."""
    hidden = None
    if mask:
        hidden = tokens(batch, n, seed=9) < 0.5
        hidden[-1] = False
    weight = (tokens(2 * dim, dim, seed=1) / dim**0.5).to(dtype)
    b = tokens(2 * dim, seed=2).to(dtype) if bias else None
    return tokens(batch, n, dim).to(dtype), weight, b, hidden, heads, order


def spreading(batch, n, dim, heads, order, *, bias=True, out=None, dtype=torch.float32):
    """Arguments of qt_spread with some denominators below the bound, and some below zero."""
    d, out = dim // heads, out or dim
    moments = (tokens(batch, heads, 1 + order * d, d + 1, seed=3) / d).float()
    moments[:, :, 0, d], least = 1.0, torch.full((batch,), 0.9)
    q, last = (tokens(size, dim, seed=4 + i) / dim**0.5 for i, size in enumerate((dim, out)))
    b, b_last = ((tokens(size, seed=6 + i).to(dtype) if bias else None) for i, size in enumerate((dim, out)))
    return tokens(batch, n, dim).to(dtype), q.to(dtype), b, moments, least, last.to(dtype), b_last


def in_float64(args):
    return tuple(a.double() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args)


def derivatives(operator, args, impl, rounded=torch.float32):
    """The output and the gradients of all inputs that have one, by name, for a cotangent rounded to `rounded`."""
    leaves = [a.detach().requires_grad_() if i in operator.wrt and a is not None else a for i, a in enumerate(args)]
    out = operator(*leaves, impl=impl)
    cotangent = tokens(*out.shape, seed=8).to(rounded).to(out.dtype)
    inputs = {name: a for name, a, i in zip(operator.names, leaves, range(99), strict=False) if i in operator.wrt}
    inputs = {name: a for name, a in inputs.items() if a is not None}
    grads = torch.autograd.grad(out, list(inputs.values()), cotangent, allow_unused=True)
    pairs = zip(inputs.items(), grads, strict=True)
    return {"output": out, **{name: torch.zeros_like(a) if grad is None else grad for (name, a), grad in pairs}}


def agree(operator, args, tolerance=1e-5):
    ours, expected = derivatives(operator, args, "native"), derivatives(operator, in_float64(args), "eager")
    for name, value in ours.items():
        assert value.shape == expected[name].shape and value.dtype == torch.float32, name
        assert relative_error(value, expected[name]) < tolerance, f"{name}: the error exceeds the rounding of float32"


@needs_it
@every_order
@every_shape
def test_the_pool_and_its_gradients(shape, order, fresh_memory_is_nan):
    for given in (True, False):
        agree(qt_pool, pooling(*SHAPES[shape], order, bias=given, mask=given))


@needs_it
@every_order
@every_shape
def test_the_spread_and_its_gradients(shape, order, fresh_memory_is_nan):
    for given in (True, False):
        agree(qt_spread, spreading(*SHAPES[shape], order, bias=given, out=None if given else 37))


@needs_it
def test_the_cases_have_bounded_and_free_denominators():
    """If all denominators were bounded, or none, a wrong gradient would go unnoticed."""
    x, weight, bias, moments, least, *_ = spreading(*SHAPES["odd"], 2)
    q = (x @ weight.t() + bias).unflatten(-1, (3, -1)).transpose(1, 2)
    below = (torch.cat((torch.ones_like(q[..., :1]), q, q * q), -1) @ moments)[..., -1]
    bounded = (below < least).float().mean()
    assert 0.1 < bounded < 0.9, bounded


@needs_it
def test_a_sample_without_tokens_pools_to_zero():
    moments = qt_pool(*pooling(*SHAPES["a block"], 2), impl="native")
    assert moments[0].abs().min() > 0 and not moments[-1].any()
    none = qt_pool(*pooling(2, 0, 48, 3, 2, mask=False), impl="native")
    assert none.shape == (2, 3, 33, 17) and not none.any(), "empty sums must be written as zeros"


@needs_it
def test_padding_is_never_read_into_the_sums():
    args = pooling(*SHAPES["a block"], 2)
    expected = qt_pool(*args, impl="native")
    args[0][~args[3]] = torch.nan
    assert torch.equal(qt_pool(*args, impl="native"), expected)


@needs_it
def test_sums_of_very_many_tokens_stay_precise():
    """Adding 100,000 squares one after another in float32 would lose a digit."""
    x, *rest = pooling(1, 100_000, 16, 1, 2, mask=False)
    args = (x + 1.0, *rest)
    assert relative_error(qt_pool(*args, impl="native"), qt_pool(*in_float64(args), impl="eager")) < 2e-6


@needs_it
@every_order
def test_bf16_is_rounded_once(order, processor):
    processor(amx=False, avx512=False)
    for operator, args in ((qt_pool, pooling(*SHAPES["odd"], order, mask=False, dtype=torch.bfloat16)),
                           (qt_spread, spreading(*SHAPES["odd"], order, dtype=torch.bfloat16))):  # fmt: skip
        ours = derivatives(operator, args, "native", torch.bfloat16)
        expected = derivatives(operator, in_float64(args), "eager", torch.bfloat16)
        for name, value in ours.items():
            kept = name == "moments" or (operator is qt_pool and name == "output")
            assert value.dtype == (torch.float32 if kept else torch.bfloat16), name
            bound = {"rtol": 0.0 if kept else 2**-8, "atol": 1e-5 * expected[name].abs().max().item()}
            assert torch.allclose(value.double(), expected[name], **bound), f"{name}: rounded more than once"


@needs_it
@every_order
def test_products_in_bf16_are_as_exact_as_those_of_pytorch(order, processor, vectors):
    processor(amx=False, avx512=True)
    for operator, args in ((qt_pool, pooling(*SHAPES["odd"], order, mask=False, dtype=torch.bfloat16)),
                           (qt_spread, spreading(*SHAPES["odd"], order, dtype=torch.bfloat16))):  # fmt: skip
        ours = derivatives(operator, args, "native", torch.bfloat16)
        plain = derivatives(operator, args, "eager", torch.bfloat16)
        expected = derivatives(operator, in_float64(args), "eager", torch.bfloat16)
        for name, value in ours.items():
            error, allowed = (relative_error(y, expected[name]) for y in (value, plain[name]))
            assert error <= max(1.5 * allowed, 2**-8), f"{name}: {error:.1e} > {allowed:.1e}"


@needs_it
def test_any_layout_of_the_tokens():
    """Transposed tokens, slices of a wider array, every other token, not aligned to a vector."""

    def wide(x):
        return torch.cat((x, x, x), -1)[..., 48:96]

    def sparse(x):
        return x.repeat_interleave(2, 1)[:, ::2]

    def turned(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def shifted(x):
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    for operator, args in ((qt_pool, pooling(*SHAPES["a block"], 2)), (qt_spread, spreading(*SHAPES["a block"], 2))):
        expected = derivatives(operator, args, "native")
        for change in (wide, sparse, turned, shifted):
            gradients = derivatives(operator, (change(args[0]), *args[1:]), "native")
            assert all(relative_error(gradients[name], expected[name].double()) < 1e-6 for name in expected), (
                change.__name__
            )


@needs_it
def test_results_are_reproducible_and_close_for_any_number_of_threads():
    """Each number of threads divides the samples differently; five threads are more than some samples have blocks."""
    before = torch.get_num_threads()
    shapes = [SHAPES[name] for name in ("samples that threads share", "sums of sums")]
    for operator, args in (*((qt_pool, pooling(*shape, 2)) for shape in shapes),
                           *((qt_spread, spreading(*shape, 2)) for shape in shapes)):  # fmt: skip
        expected = derivatives(operator, in_float64(args), "eager")
        try:
            for threads in (1, 2, 4, 5, 12):
                torch.set_num_threads(threads)
                first, second = (derivatives(operator, args, "native") for _ in range(2))
                assert all(torch.equal(first[name], second[name]) for name in first), threads
                assert all(relative_error(first[name], expected[name]) < 1e-5 for name in first), threads
        finally:
            torch.set_num_threads(before)


@needs_it
def test_processors_with_other_vectors(vectors):
    """With vectors of other lengths, other heads fill whole vectors."""
    for shape in SHAPES.values():
        for order in (1, 2):
            agree(qt_pool, pooling(*shape, order))
            agree(qt_spread, spreading(*shape, order))


@needs_it
@every_order
@pytest.mark.parametrize("masked", [False, True])
def test_a_mixer_with_the_kernels_equals_eager_code(order, masked):
    mixer = mixer_of("qt", 60, heads=3, order=order)
    x, context, mask = tokens(2, 41, 60), tokens(2, 133, 60, seed=1), None
    if masked:
        mask = tokens(2, 133, seed=2) < 0.5
        mask[1] = False
    results = []
    for impl, dtype in (("native", torch.float32), ("eager", torch.float64)):
        other, query, source = (
            of(mixer, impl).to(dtype),
            x.to(dtype).requires_grad_(),
            context.to(dtype).requires_grad_(),
        )
        y = other(query, source, mask=mask)
        leaves = {"x": query, "context": source, **dict(other.named_parameters())}
        grads = torch.autograd.grad(y.square().sum(), leaves.values(), allow_unused=True)
        results.append({"output": y, **dict(zip(leaves, grads, strict=True))})
    if order == 0:  # γ² goes into numerators and denominators alike: its gradient is what rounding leaves
        assert results[0].pop("scale").abs().max() < 1e-4 * results[0]["qkv.qkv.weight"].abs().max()
        results[1].pop("scale")
    for name, expected in results[1].items():
        expected = torch.zeros_like(results[0][name]).double() if expected is None else expected
        ours = torch.zeros_like(expected) if results[0][name] is None else results[0][name].double()
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * max(expected.abs().max().item(), 1e-3)), name
