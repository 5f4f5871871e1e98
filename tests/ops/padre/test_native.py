"""PADRe's C kernels against the definition in float64, on sizes that are no multiple of a vector, tile or strip."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymix.ops.padre.eager import step
from tests.helpers import tokens
from tests.ops.kernels import in_float64, needs_it, relative_error

SHAPES = {  # batch, grid, kernel, channels, causal
    "one place": (1, (1,), (1,), 1, False), "short": (2, (5,), (3,), 17, False), "causal": (2, (37,), (4,), 16, True),
    "causal, longer kernel than tokens": (1, (3,), (8,), 5, True), "long": (1, (1500,), (7,), 20, False),
    "kernel beyond the grid": (2, (3, 2), (11, 11), 33, False), "11 x 11": (3, (14, 14), (11, 11), 48, False),
    "13 x 3": (1, (20, 9), (13, 3), 16, False), "1 x 9": (2, (6, 31), (1, 9), 31, False), "flat": (1, (1, 40), (5, 5), 4, False),
    "many strips": (1, (120, 75), (11, 11), 18, False), "wide": (1, (4, 700), (3, 5), 16, False), "no sample": (0, (4, 4), (3, 3), 16, False),
}  # fmt: skip
every_shape = pytest.mark.parametrize("shape", list(SHAPES))


def arguments(batch, grid, kernel, dim, causal, dtype=torch.float32, bias=True, y=True):
    n = int(torch.tensor(grid).prod())
    x = tokens(batch, n + (kernel[0] - 1 if causal else 0), dim).to(dtype)
    weight = tokens(dim, 1, *kernel, seed=1).to(dtype)
    return (x, weight, tokens(dim, seed=2).to(dtype) if bias else None, tokens(batch, n, dim, seed=3).to(dtype) if y else None,
            list(grid), causal, 1)  # fmt: skip


def derivatives(args, impl, rounded=torch.float32):
    """The output and the gradients, for a cotangent rounded to the dtype `rounded`."""
    leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    out = torch.ops.polymix.padre_step(*leaves, impl)
    cotangent = tokens(*out.shape, seed=4).to(rounded).to(out.dtype)
    return [out, *torch.autograd.grad(out, [a for a in leaves if isinstance(a, torch.Tensor)], cotangent)]


@needs_it
@every_shape
@pytest.mark.parametrize(("bias", "y"), [(True, True), (False, False), (True, False), (False, True)])
def test_the_step_and_its_gradients(shape, bias, y, fresh_memory_is_nan):
    args = arguments(*SHAPES[shape], bias=bias, y=y)
    for ours, expected in zip(derivatives(args, "native"), derivatives(in_float64(args), "eager"), strict=True):
        assert (ours.shape, ours.dtype) == (expected.shape, torch.float32)
        assert relative_error(ours, expected) < 3e-6, "more than the rounding of float32 sums of float32 products"


@needs_it
@every_shape
def test_bf16_is_rounded_once(shape):
    args = arguments(*SHAPES[shape], dtype=torch.bfloat16)
    results = (derivatives(a, impl, torch.bfloat16) for a, impl in ((args, "native"), (in_float64(args), "eager")))
    for ours, expected in zip(*results, strict=True):
        assert ours.dtype == torch.bfloat16
        largest = expected.abs().max().item() if expected.numel() else 1.0
        assert torch.allclose(ours.double(), expected, rtol=2**-8, atol=1e-5 * largest)


@needs_it
def test_bf16_keeps_nan_and_infinity():
    args = arguments(1, (3, 4), (1, 1), 16, False, dtype=torch.bfloat16, bias=False, y=False)
    args[1].fill_(1.0)
    for value in (float("nan"), float("inf"), -float("inf"), 3.3895e38, 1e-40, 0.0):
        args[0].fill_(value)
        assert torch.allclose(torch.ops.polymix.padre_step(*args, "native"), args[0], equal_nan=True), value


@needs_it
@given(
    batch=st.integers(1, 3), grid=st.lists(st.integers(1, 19), min_size=1, max_size=2), dim=st.integers(1, 40),
    half=st.lists(st.integers(0, 6), min_size=2, max_size=2), causal=st.booleans(), even=st.integers(0, 1),
)  # fmt: skip
def test_any_shape(batch, grid, dim, half, causal, even):
    causal = causal and len(grid) == 1
    kernel = tuple(2 * k + 1 for k in half[: len(grid)])
    kernel = (kernel[0] + even,) if causal else kernel
    args = arguments(batch, tuple(grid), kernel, dim, causal)
    for ours, expected in zip(derivatives(args, "native"), derivatives(in_float64(args), "eager"), strict=True):
        assert relative_error(ours, expected) < 3e-6


@needs_it
def test_any_layout_of_the_tokens():
    """Transposed tokens, slices of a wider array, every other token, one sample for all."""
    args = arguments(2, (5, 7), (3, 3), 24, False)
    expected = derivatives(in_float64(args), "eager")

    def wide(x):
        return torch.cat((x, x, x), -1)[..., 24:48]

    def sparse(x):
        return x.repeat_interleave(2, 1)[:, ::2]

    def turned(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def shifted(x):  # not aligned to a vector
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    for change in (wide, sparse, turned, shifted):
        changed = (change(args[0]), *args[1:3], change(args[3]), *args[4:])
        errors = [relative_error(a, b) for a, b in zip(derivatives(changed, "native"), expected, strict=True)]
        assert all(e < 3e-6 for e in errors), change.__name__
    one = (args[0][:1].expand(3, -1, -1), *args[1:3], args[3][:1].expand(3, -1, -1), *args[4:])
    out = torch.ops.polymix.padre_step(*one, "native")
    assert all(torch.equal(out[0], sample) for sample in out)


@needs_it
def test_the_result_does_not_depend_on_the_number_of_threads():
    args = arguments(*SHAPES["many strips"])
    results, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            results.append(derivatives(args, "native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other, strict=True))


@needs_it
def test_the_output_may_overwrite_y():
    from polymix.ops.padre.native import step

    x, weight, bias, y, *_ = arguments(*SHAPES["many strips"])
    expected = step(x, weight, bias, y, (120, 75))
    assert step(x, weight, bias, y, (120, 75), out=y) is y and torch.equal(y, expected)


@needs_it
def test_a_sum_over_many_samples_that_cancel():
    """The weight's gradient is summed in float64 over strips: here 2,000 large contributions almost cancel."""
    x, grad = torch.ones(2000, 4, 16), torch.full((2000, 4, 16), 1e4)
    grad[1::2] *= -1
    grad[0] += 1.0
    from polymix.ops.padre.native import step_backward

    _, weight, bias, _ = step_backward(grad, x, torch.ones(16, 1, 1, 1), torch.ones(16), None, (2, 2))
    assert torch.allclose(weight.flatten(), torch.full((16,), 4.0)) and torch.allclose(bias, torch.full((16,), 4.0))


@needs_it
def test_processors_with_other_vectors(vectors):
    """The code for vectors of four, eight and sixteen floats."""
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            args = arguments(*SHAPES[shape], dtype=dtype)
            results = (derivatives(a, impl, dtype) for a, impl in ((args, "native"), (in_float64(args), "eager")))
            for ours, expected in zip(*results, strict=True):
                assert relative_error(ours, expected) < (3e-6 if dtype == torch.float32 else 2**-8), shape


def test_the_eager_operator_is_the_definition():
    args = in_float64(arguments(1, (4, 4), (3, 3), 4, False))
    assert torch.equal(torch.ops.polymix.padre_step(*args, "eager"), step(*args))
