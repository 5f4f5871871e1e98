"""The pooled products in Triton against the written-out sums in float64, forward and backward."""

import math

import pytest
import torch

from tests.ops.kernels import DEVICE, assert_close, assert_same_bits, to_float64, twice_the_error, with_gradients

pytest.importorskip("triton", reason="untested: the Triton kernels of pooled products, which need Triton")

from polymix.ops.pooled import triton as pooled

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unwritten_is_nan")]
NAMES = ("output", "gradient of the first", "gradient of the second", "gradient of the position weights")
SIZES = {  # batch, tokens, heads, channels a head
    "odd": (2, 63, 3, 20),
    "one head of 192": (1, 100, 1, 192),
    "60 channels, 257 tokens": (1, 257, 1, 60),
    "one token": (3, 1, 2, 64),
}
POOLS = {  # v, p_2, mask
    "poly_sa": (True, True, False),
    "poly_sa of means": (True, False, True),
    "poly_nl": (True, False, False),
    "poly_nl of order 2": (False, False, True),
    "positions alone": (False, True, False),
    "positions and mask": (True, True, True),
}


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape).to(DEVICE, dtype)


def pool_inputs(size, parts, dtype=torch.float32):
    """(grad, k, v, p_2) and the mask. The last row has no real token, and all padding is NaN."""
    batch, n, heads, width = size
    has_v, has_p, has_mask = parts
    grad, k = draw(batch, heads, width), draw(*size, dtype=dtype)
    v = draw(*size, dtype=dtype) if has_v else None
    p_2 = draw(heads, n) if has_p else None
    mask = (torch.rand(batch, n) < 0.7).to(DEVICE) if has_mask else None
    if mask is not None:
        mask[-1] = False
        for x in (k, v):
            if x is not None:
                x[~mask] = math.nan
    return (grad, k, v, p_2), mask


def spread_inputs(size, dtype=torch.float32, weighted=True):
    """grad, q, gate and p_1."""
    batch, n, heads, width = size
    gate, p_1 = draw(batch, heads, width), draw(heads, n) if weighted else None
    return draw(*size, dtype=dtype), draw(*size, dtype=dtype), gate, p_1


def pool_written_out(k, v, p_2, mask=None):
    if mask is not None:
        k, v = (None if x is None else x.masked_fill(~mask[..., None, None], 0.0) for x in (k, v))
    product = k if v is None else k * v
    return (product if p_2 is None else product * p_2.t()[..., None].to(product.dtype)).sum(1)


def spread_written_out(q, gate, p_1):
    y = q * gate[:, None].to(q.dtype)
    return y if p_1 is None else y * p_1.t()[..., None].to(q.dtype)


def pool(grad, k, v, p_2, mask=None):
    return [pooled.product(k, v, p_2, mask), *pooled.product_backward(grad, k, v, p_2, mask)]


def spread(grad, *inputs):
    return [pooled.gate_tokens(*inputs), *pooled.gate_tokens_backward(grad, *inputs)]


@pytest.mark.parametrize("kind", POOLS)
@pytest.mark.parametrize("size", SIZES)
def test_pool_equals_the_written_out_sum_without_padding(size, kind):
    inputs, mask = pool_inputs(SIZES[size], POOLS[kind])
    got = pool(*inputs, mask)
    assert_close(NAMES, got, with_gradients(pool_written_out, *to_float64(*inputs), mask=mask))
    if mask is not None:
        assert not got[0][-1].any(), "a row without real tokens must pool to zero"
        assert not got[1][~mask].any(), "padding must have no gradient"


@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("size", SIZES)
def test_spread_equals_the_written_out_product(size, weighted):
    inputs = spread_inputs(SIZES[size], weighted=weighted)
    assert_close(NAMES, spread(*inputs), with_gradients(spread_written_out, *to_float64(*inputs)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_at_most_twice_the_error_of_eager_code(dtype):
    pooling, _ = pool_inputs(SIZES["odd"], POOLS["poly_sa"], dtype)
    for run, formula, inputs in (
        (pool, pool_written_out, pooling),
        (spread, spread_written_out, spread_inputs(SIZES["odd"], dtype)),
    ):
        want = with_gradients(formula, *to_float64(*inputs))
        plain = with_gradients(formula, *inputs)
        got = run(*inputs)
        assert_close(NAMES, got, want, twice_the_error(plain, want, dtype))
        assert got[1].dtype == dtype and got[3].dtype == torch.float32, (
            "gradients of tokens keep their dtype, those of parameters are float32"
        )


def test_any_strides_give_the_same_bits_as_contiguous_tensors():
    batch, n, heads, width = SIZES["odd"]
    fused = draw(batch, n, 3, heads, width)
    q, k, v = fused.unbind(2)  # as a fused projection hands them over
    turned = draw(batch, heads, width, n).permute(0, 3, 1, 2)
    grad, p = draw(width, heads, batch).permute(2, 1, 0), draw(n, heads).t()
    mask = (torch.rand(n, batch) < 0.7).to(DEVICE).t()
    cases = ((pool, (grad, k, v, p, None)), (pool, (grad, turned, v, None, mask)), (spread, (turned, q, grad, p)))
    for run, inputs in cases:
        again = run(*(None if x is None else x.contiguous() for x in inputs))
        assert_same_bits(NAMES, run(*inputs), again, "an input is read by the wrong strides")


def test_few_programs_process_all_tiles(monkeypatch):
    monkeypatch.setattr(pooled, "PROGRAMS", 1)
    inputs, mask = pool_inputs((2, 100, 2, 20), (True, True, True))
    assert_close(NAMES, pool(*inputs, mask), with_gradients(pool_written_out, *to_float64(*inputs), mask=mask))
    inputs = spread_inputs((2, 100, 2, 20))
    assert_close(NAMES, spread(*inputs), with_gradients(spread_written_out, *to_float64(*inputs)))


@pytest.mark.parametrize("size", [(0, 5, 2, 8), (2, 0, 2, 8)])
def test_no_sample_or_no_token_pools_to_zero(size):
    batch, n, heads, width = size
    grad, p = draw(batch, heads, width), draw(heads, n)
    out, grad_k, _, grad_p = pool(grad, draw(*size), draw(*size), p)
    assert out.shape == grad.shape and not out.any(), "a sum over no tokens must be zero"
    assert grad_k.shape == size and grad_p.shape == p.shape and not grad_p.any(), (
        "an empty batch must give zero gradients"
    )
    y, grad_q, grad_gate, _ = spread(draw(*size), draw(*size), grad, p)
    assert y.shape == grad_q.shape == size and not grad_gate.any(), "a sum over no tokens must be zero"


def test_two_runs_give_the_same_bits():
    pooling, spreading = pool_inputs(SIZES["odd"], POOLS["poly_sa"])[0], spread_inputs(SIZES["odd"])
    for run, inputs in ((pool, pooling), (spread, spreading)):
        assert_same_bits(NAMES, run(*inputs), run(*inputs), "depends on which program ends first")
