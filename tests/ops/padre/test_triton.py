"""PADRe's fused step in Triton against the written-out convolution in float64, forward and backward."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

from polymix.ops.shared.depthwise import depthwise_conv
from tests.ops.kernels import DEVICE, assert_close, assert_same_bits, twice, wide, with_gradients

pytest.importorskip("triton", reason="untested: PADRe's kernels, for which Triton is needed")

from polymix.ops.padre import triton as padre

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unwritten_is_nan")]
NAMES = ("output", "gradient of x", "gradient of the weight", "gradient of the bias", "gradient of y")
CASES = {  # batch, grid, kernel, channels, causal, dilation
    "1d": (2, (63,), (5,), 3, False, 1),
    "1d of 100, 60 channels": (1, (100,), (3,), 60, False, 1),
    "causal 257": (1, (257,), (4,), 3, True, 1),
    "causal dilated": (2, (30,), (3,), 33, True, 3),
    "one token": (2, (1,), (5,), 4, False, 1),
    "one token, causal": (1, (1,), (4,), 4, True, 2),
    "2d": (2, (5, 7), (3, 5), 5, False, 1),
    "2d of one row": (1, (1, 10), (3, 3), 4, False, 1),
    "2d dilated": (1, (6, 11), (3, 3), 4, False, 2),
    "kernel beyond the grid": (1, (3, 2), (7, 7), 4, False, 1),
    "line of taps in two chunks": (1, (1, 12), (1, 19), 4, False, 1),
    "3d": (1, (3, 4, 5), (3, 1, 3), 6, False, 1),
}
PARTS = {"all": (True, True), "no bias": (False, True), "no y": (True, False), "convolution": (False, False)}


def inputs(case, parts=(True, True), dtype=torch.float64):
    batch, grid, kernel, dim, causal, dilation = case
    n = math.prod(grid)
    seen = n + dilation * (kernel[0] - 1) if causal else n
    shapes = ((batch, n, dim), (batch, seen, dim), (dim, 1, *kernel), (dim,), (batch, n, dim))
    keep = (True, True, True, *parts)
    made = [torch.randn(shape).to(DEVICE, dtype) if k else None for shape, k in zip(shapes, keep, strict=True)]
    return made, grid, {"causal": causal, "dilation": dilation}


def written_out(x, weight, bias, y, grid, *, causal, dilation):
    """A sum over the taps, each the tokens moved by that tap."""
    kernel = weight.shape[2:]
    if not causal:
        pads = [(dilation * (k // 2),) * 2 for k in kernel]
        x = F.pad(x.unflatten(1, grid), (0, 0, *itertools.chain(*reversed(pads))))
    out = 0
    for tap in itertools.product(*(range(k) for k in kernel)):
        at = tuple(slice(t * dilation, t * dilation + size) for t, size in zip(tap, grid, strict=True))
        out = out + x[(slice(None), *at)] * weight[(slice(None), 0, *tap)]
    out = out.flatten(1, -2)
    out = out if bias is None else out + bias
    return out if y is None else out * y


def eager(x, weight, bias, y, grid, **how):
    out = depthwise_conv(x, weight, grid, **how)
    out = out if bias is None else out + bias
    return out if y is None else out * y


def launched(made, grid, how):
    grad, *rest = made
    return [padre.step(*rest, grid, **how), *padre.step_backward(grad, *rest, grid, **how)]


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_the_written_out_convolution(case):
    made, grid, how = inputs(CASES[case])
    want = with_gradients(written_out, *made, grid=grid, **how)
    assert_close(NAMES, launched([t.float() for t in made], grid, how), want)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", ["2d", "causal dilated"])
def test_without_bias_or_y_only_what_is_given_has_a_gradient(case, parts):
    made, grid, how = inputs(CASES[case], PARTS[parts])
    got = launched([None if t is None else t.float() for t in made], grid, how)
    assert_close(NAMES, got, with_gradients(written_out, *made, grid=grid, **how))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["2d", "causal dilated", "3d"])
def test_half_precision_errs_at_most_twice_as_much_as_eager(case, dtype):
    made, grid, how = inputs(CASES[case], dtype=dtype)
    want = with_gradients(written_out, *wide(*made), grid=grid, **how)
    plain = with_gradients(eager, *made, grid=grid, **how)
    got = launched(made, grid, how)
    assert_close(NAMES, got, want, twice(plain, want, dtype))
    kinds = [t.dtype for t in got]
    assert kinds == [dtype, dtype, torch.float32, torch.float32, dtype], "x and y keep their type, parameters sum wide"


@pytest.mark.parametrize("case", ["2d", "causal dilated"])
def test_any_strides_give_the_same_bits_as_contiguous_tensors(case):
    made, grid, how = inputs(CASES[case], dtype=torch.float32)
    grad, x, weight, bias, y = made
    channels_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.stack((y, -y), -1).flatten(2)[..., ::2]
    every_other = torch.stack((grad, -grad), 2).flatten(1, 2)[:, ::2]
    turned = weight.transpose(0, -1).contiguous().transpose(0, -1)
    spaced = torch.stack((bias, -bias), -1)[:, 0]
    got = launched([every_other, channels_first, turned, spaced, sliced], grid, how)
    assert_same_bits(NAMES, got, launched(made, grid, how), "reads its inputs by the wrong strides")


@pytest.mark.parametrize("case", ["2d", "causal 257", "3d"])
def test_one_launch_of_few_programs_walks_all_its_tiles(case, monkeypatch):
    monkeypatch.setattr(padre, "PROGRAMS", 1)
    made, grid, how = inputs(CASES[case])
    want = with_gradients(written_out, *made, grid=grid, **how)
    assert_close(NAMES, launched([t.float() for t in made], grid, how), want)


@pytest.mark.parametrize("case", ["1d", "causal dilated", "2d dilated"])
def test_a_nan_reaches_only_the_tokens_whose_kernel_it_lies_under(case):
    (_, x, weight, _, _), grid, how = inputs(CASES[case], (False, False), torch.float32)
    weight = weight.abs() + 1
    x[:, x.shape[1] // 2] = math.nan
    got = padre.step(x, weight, None, None, grid, **how)
    hit = written_out(x.isnan().float(), weight, None, None, grid, **how) > 0
    assert torch.equal(got.isnan(), hit), (
        "a token's NaN leaks to, or misses, tokens that the kernel does not, or does, join"
    )


def test_an_empty_batch_gives_empty_outputs_and_gradients_of_zero():
    made, grid, how = inputs((0, *CASES["2d"][1:]), dtype=torch.float32)
    out, grad_x, grad_weight, grad_bias, grad_y = launched(made, grid, how)
    assert out.numel() == grad_x.numel() == grad_y.numel() == 0
    assert not grad_weight.any() and not grad_bias.any(), "no sample gives no gradient, and no NaN"


def test_two_runs_give_the_same_bits():
    made, grid, how = inputs(CASES["2d"], dtype=torch.float32)
    once, again = launched(made, grid, how), launched(made, grid, how)
    assert_same_bits(NAMES, once, again, "depends on the order in which programs finish")
