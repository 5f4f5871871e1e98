"""The kernels in C against the definition in float64, on sizes that fill no vector, tile or strip; and their building."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymix.ops.padre.eager import step
from tests.helpers import tokens
from tests.ops.kernels import doubled, needs_it, off

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
    """Output and gradients, of a cotangent that is a number of the type `rounded`."""
    leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) else a for a in args]
    out = torch.ops.polymix.padre_step(*leaves, impl)
    cotangent = tokens(*out.shape, seed=4).to(rounded).to(out.dtype)
    return [out, *torch.autograd.grad(out, [a for a in leaves if isinstance(a, torch.Tensor)], cotangent)]


@needs_it
@every_shape
@pytest.mark.parametrize("given", [(True, True), (False, False), (True, False), (False, True)])
def test_the_step_and_its_gradients(shape, given, fresh_memory_is_nan):
    args = arguments(*SHAPES[shape], bias=given[0], y=given[1])
    for ours, wanted in zip(derivatives(args, "native"), derivatives(doubled(args), "eager"), strict=True):
        assert (ours.shape, ours.dtype) == (wanted.shape, torch.float32)
        assert off(ours, wanted) < 3e-6, "sums in float32 of products in float32"


@needs_it
@every_shape
def test_bf16_is_rounded_once(shape):
    args = arguments(*SHAPES[shape], dtype=torch.bfloat16)
    found = (derivatives(given, impl, torch.bfloat16) for given, impl in ((args, "native"), (doubled(args), "eager")))
    for ours, wanted in zip(*found, strict=True):
        assert ours.dtype == torch.bfloat16
        largest = wanted.abs().max().item() if wanted.numel() else 1.0
        assert torch.allclose(ours.double(), wanted, rtol=2**-8, atol=1e-5 * largest)


@needs_it
def test_bf16_keeps_what_is_not_finite():
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
    for ours, wanted in zip(derivatives(args, "native"), derivatives(doubled(args), "eager"), strict=True):
        assert off(ours, wanted) < 3e-6


@needs_it
def test_any_layout_of_the_tokens():
    """Transposed, cut out of something wider, every other token, one sample for all: no copy may be forgotten."""
    args = arguments(2, (5, 7), (3, 3), 24, False)
    wanted = derivatives(doubled(args), "eager")

    def wide(x):
        return torch.cat((x, x, x), -1)[..., 24:48]

    def sparse(x):
        return x.repeat_interleave(2, 1)[:, ::2]

    def turned(x):
        return x.transpose(1, 2).contiguous().transpose(1, 2)

    def shifted(x):  # begins where no vector does
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape)

    for change in (wide, sparse, turned, shifted):
        given = (change(args[0]), *args[1:3], change(args[3]), *args[4:])
        assert all(off(a, b) < 3e-6 for a, b in zip(derivatives(given, "native"), wanted, strict=True)), change.__name__
    one = (args[0][:1].expand(3, -1, -1), *args[1:3], args[3][:1].expand(3, -1, -1), *args[4:])
    out = torch.ops.polymix.padre_step(*one, "native")
    assert all(torch.equal(out[0], sample) for sample in out)


@needs_it
def test_the_same_bits_whatever_the_threads():
    args = arguments(*SHAPES["many strips"])
    found, before = [], torch.get_num_threads()
    try:
        for threads in (1, 2, 5, 1):
            torch.set_num_threads(threads)
            found.append(derivatives(args, "native"))
    finally:
        torch.set_num_threads(before)
    assert all(torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True))


@needs_it
def test_the_output_may_take_the_place_of_y():
    from polymix.ops.padre.native import step

    x, weight, bias, y, *_ = arguments(*SHAPES["many strips"])
    wanted = step(x, weight, bias, y, (120, 75))
    assert step(x, weight, bias, y, (120, 75), out=y) is y and torch.equal(y, wanted)


@needs_it
def test_a_sum_over_many_samples_that_cancel():
    """The weight's gradient in float64 between strips: 2,000 samples of large gradients, of which little is left."""
    x, grad = torch.ones(2000, 4, 16), torch.full((2000, 4, 16), 1e4)
    grad[1::2] *= -1
    grad[0] += 1.0
    from polymix.ops.padre.native import step_backward

    _, weight, bias, _ = step_backward(grad, x, torch.ones(16, 1, 1, 1), torch.ones(16), None, (2, 2))
    assert torch.allclose(weight.flatten(), torch.full((16,), 4.0)) and torch.allclose(bias, torch.full((16,), 4.0))


@needs_it
def test_processors_with_other_vectors(vectors):
    """Four or eight floats at once, with half the registers; such machines as this one run their code too."""
    for shape in SHAPES:
        for dtype in (torch.float32, torch.bfloat16):
            args = arguments(*SHAPES[shape], dtype=dtype)
            found = (derivatives(given, impl, dtype) for given, impl in ((args, "native"), (doubled(args), "eager")))
            for ours, wanted in zip(*found, strict=True):
                assert off(ours, wanted) < (3e-6 if dtype == torch.float32 else 2**-8), shape


# Its building


def test_the_definition_is_what_the_kernels_are_held_to():
    args = doubled(arguments(1, (4, 4), (3, 3), 4, False))
    assert torch.equal(torch.ops.polymix.padre_step(*args, "eager"), step(*args))
