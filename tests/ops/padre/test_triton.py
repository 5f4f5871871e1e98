"""PADRe's fused step in Triton against the written-out convolution in float64, forward and backward."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import polymix
from polymix.ops.shared.depthwise import depthwise_conv
from tests.ops.kernels import DEVICE, assert_close, assert_same_bits, to_float64, twice_the_error, with_gradients

pytest.importorskip("triton", reason="untested: PADRe's Triton kernels, which need Triton")

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
    tensors = [torch.randn(shape).to(DEVICE, dtype) if k else None for shape, k in zip(shapes, keep, strict=True)]
    return tensors, grid, {"causal": causal, "dilation": dilation}


def written_out(x, weight, bias, y, grid, *, causal, dilation):
    """The convolution as a sum over the taps of shifted tokens."""
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


def eager(x, weight, bias, y, grid, **options):
    out = depthwise_conv(x, weight, grid, **options)
    out = out if bias is None else out + bias
    return out if y is None else out * y


def launched(tensors, grid, options):
    grad, *rest = tensors
    return [padre.step(*rest, grid, **options), *padre.step_backward(grad, *rest, grid, **options)]


@pytest.mark.parametrize("case", CASES)
def test_float32_equals_the_written_out_convolution(case):
    tensors, grid, options = inputs(CASES[case])
    want = with_gradients(written_out, *tensors, grid=grid, **options)
    assert_close(NAMES, launched([t.float() for t in tensors], grid, options), want)


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("case", ["2d", "causal dilated"])
def test_without_bias_or_y_only_the_other_inputs_have_gradients(case, parts):
    tensors, grid, options = inputs(CASES[case], PARTS[parts])
    got = launched([None if t is None else t.float() for t in tensors], grid, options)
    assert_close(NAMES, got, with_gradients(written_out, *tensors, grid=grid, **options))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", ["2d", "causal dilated", "3d"])
def test_half_precision_has_at_most_twice_the_error_of_eager_code(case, dtype):
    tensors, grid, options = inputs(CASES[case], dtype=dtype)
    want = with_gradients(written_out, *to_float64(*tensors), grid=grid, **options)
    plain = with_gradients(eager, *tensors, grid=grid, **options)
    got = launched(tensors, grid, options)
    assert_close(NAMES, got, want, twice_the_error(plain, want, dtype))
    kinds = [t.dtype for t in got]
    assert kinds == [dtype, dtype, torch.float32, torch.float32, dtype], (
        "gradients of x and y keep their dtype, those of parameters are float32"
    )


@pytest.mark.parametrize("case", ["2d", "causal dilated"])
def test_any_strides_give_what_contiguous_tensors_do(case):
    tensors, grid, options = inputs(CASES[case], dtype=torch.float32)
    grad, x, weight, bias, y = tensors
    channels_first = x.transpose(1, 2).contiguous().transpose(1, 2)
    sliced = torch.stack((y, -y), -1).flatten(2)[..., ::2]
    every_other = torch.stack((grad, -grad), 2).flatten(1, 2)[:, ::2]
    turned = weight.transpose(0, -1).contiguous().transpose(0, -1)
    spaced = torch.stack((bias, -bias), -1)[:, 0]
    got, want = (
        launched([every_other, channels_first, turned, spaced, sliced], grid, options),
        launched(tensors, grid, options),
    )
    if DEVICE == "cuda":  # where the strides decide how a tile lies in registers, and thus the order of a sum
        assert_close(NAMES, got, want, [1e-5] * len(NAMES))
    else:
        assert_same_bits(NAMES, got, want, "wrong strides")


@pytest.mark.parametrize("case", ["2d", "causal 257", "3d"])
def test_few_programs_process_all_tiles(case, monkeypatch):
    monkeypatch.setattr(padre, "PROGRAMS", 1)
    tensors, grid, options = inputs(CASES[case])
    want = with_gradients(written_out, *tensors, grid=grid, **options)
    assert_close(NAMES, launched([t.float() for t in tensors], grid, options), want)


@pytest.mark.parametrize("case", ["1d", "causal dilated", "2d dilated"])
def test_a_nan_reaches_only_the_tokens_whose_kernel_covers_it(case):
    (_, x, weight, _, _), grid, options = inputs(CASES[case], (False, False), torch.float32)
    weight = weight.abs() + 1
    x[:, x.shape[1] // 2] = math.nan
    got = padre.step(x, weight, None, None, grid, **options)
    hit = written_out(x.isnan().float(), weight, None, None, grid, **options) > 0
    assert torch.equal(got.isnan(), hit), "a NaN must reach exactly the tokens whose kernel covers it"


def test_an_empty_batch_gives_empty_outputs_and_gradients_of_zero():
    tensors, grid, options = inputs((0, *CASES["2d"][1:]), dtype=torch.float32)
    out, grad_x, grad_weight, grad_bias, grad_y = launched(tensors, grid, options)
    assert out.numel() == grad_x.numel() == grad_y.numel() == 0
    assert not grad_weight.any() and not grad_bias.any(), "an empty batch must give zero gradients, not NaN"


def test_two_runs_give_the_same_bits():
    tensors, grid, options = inputs(CASES["2d"], dtype=torch.float32)
    once, again = launched(tensors, grid, options), launched(tensors, grid, options)
    assert_same_bits(NAMES, once, again, "the result depends on the order of the programs")


@pytest.mark.parametrize("grid", [(4, 5), (20,)])
@pytest.mark.parametrize("padded", [False, True])
def test_prefix_tokens_and_padding_reach_the_kernel_as_they_are(grid, padded):
    """Views of the tokens after the prefix, and zeros for padding: the output and every gradient, against eager."""
    torch.manual_seed(0)
    options = {"degree": 3, "grid": grid, "kernel_size": 3, "num_prefix_tokens": 2}
    eager = polymix.create_mixer("padre", 6, impl="eager", **options).double()
    fused = polymix.create_mixer("padre", 6, impl="triton", **options).to(DEVICE)
    fused.load_state_dict(eager.state_dict())
    x, grad, mask = torch.randn(2, 22, 6), torch.randn(2, 22, 6), None
    if padded:
        mask = torch.ones(2, 22, dtype=torch.bool)
        mask[0, 15:] = mask[1, 20:] = False
    results = []
    for mixer, device, dtype in ((eager, "cpu", torch.float64), (fused, DEVICE, torch.float32)):
        tokens = x.to(device, dtype).requires_grad_()
        y = mixer(tokens, mask=None if mask is None else mask.to(device))
        gradients = torch.autograd.grad(y, [tokens, *mixer.parameters()], grad.to(device, dtype))
        results.append([part.detach().to("cpu", torch.float64) for part in (y, *gradients)])
    for exact, got in zip(*results, strict=True):
        torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5 * float(exact.abs().max()) + 1e-7)
