"""Attention of one query in C, against the definition in float64, and which calls it takes."""

import pytest
import torch
import torch.nn.functional as F

from polymix.ops.decode import attention
from polymix.ops.decode.attention import MAX_WIDTH, try_attention
from polymix.ops.native import library
from polymix.ops.related.attention import softmax_attention

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"untested: one query in C: {library.why_not()}")
DTYPES = {torch.float32: 3e-6, torch.bfloat16: 1e-2}
SHAPES = ((1, 1, 1, 7), (2, 3, 5, 33), (1, 2, 300, 64), (3, 2, 129, 100), (1, 2, 1000, MAX_WIDTH))


def tensors(batch, heads, tokens, width, dtype=torch.float32):
    return [torch.randn(batch, heads, n, width).to(dtype) for n in (1, tokens, tokens)]


def error(got, q, k, v, mask):
    want = F.scaled_dot_product_attention(*(x.double() for x in (q, k, v)), attn_mask=mask, scale=q.shape[-1] ** -0.5)
    return float((got - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@torch.inference_mode()
def test_it_is_the_definition(shape, dtype):
    """Tokens and channels that fill no vector; masks of all sequences and of each; views of larger buffers."""
    q, k, v = tensors(*shape, dtype)
    mask = torch.rand(shape[0], 1, 1, shape[2]) > 0.4
    mask[..., 0] = True
    buffers = [torch.full((*shape[:2], shape[2] + 9, shape[3]), torch.nan, dtype=dtype) for _ in range(2)]
    for buffer, part in zip(buffers, (k, v), strict=True):
        buffer[:, :, : shape[2]] = part
    views = [buffer[:, :, : shape[2]] for buffer in buffers]
    across = [part.transpose(1, 2).contiguous().transpose(1, 2) for part in (q, k, v)]
    for seen in (None, mask, mask[:1]):
        for one, two, three in ((q, k, v), (q, *views), across):
            got = try_attention(one, two, three, seen, shape[3] ** -0.5)
            assert got is not None
            assert error(got, q, k, v, seen) < DTYPES[dtype]


@torch.inference_mode()
def test_a_query_that_sees_nothing_gets_zeros_and_nan_stays_in_its_head():
    q, k, v = tensors(2, 3, 9, 8)
    mask = torch.tensor([True, False])[:, None, None, None].expand(2, 1, 1, 9)
    y = try_attention(q, k, v, mask, 1.0)
    assert not y[1].any()
    assert y[0].any()
    want = try_attention(q, k, v, None, 1.0)
    q[0, 1], v[1, 2] = torch.nan, torch.nan
    y = try_attention(q, k, v, None, 1.0)
    broken = torch.zeros(2, 3, dtype=torch.bool)
    broken[0, 1] = broken[1, 2] = True
    assert y[broken].isnan().all()
    assert torch.equal(y[~broken], want[~broken])


@torch.inference_mode()
def test_large_scores_do_not_overflow_and_many_tokens_do_not_round():
    """A sum of 40,000 tokens one after another in float32 would be off by 1e-5 and more."""
    q, k, v = tensors(1, 1, 40_000, 16)
    assert error(try_attention(q, k, v, None, 0.25), q, k, v, None) < 3e-6
    assert torch.allclose(try_attention(1e4 * q, k[:, :, :64], v[:, :, :64], None, 1.0),
                          F.scaled_dot_product_attention(1e4 * q, k[:, :, :64], v[:, :, :64], scale=1.0))  # fmt: skip


def test_calls_that_the_kernel_cannot_take_run_pytorch(monkeypatch):
    q, k, v = tensors(1, 2, 5, 8)
    assert try_attention(q, k, v, None, 1.0) is None  # gradients may be recorded
    with torch.inference_mode():
        assert try_attention(q, k.double(), v, None, 1.0) is None
        assert try_attention(k, k, v, None, 1.0) is None  # five queries
        assert try_attention(q, k, v, torch.zeros(1, 1, 1, 5), 1.0) is None  # a bias
        assert try_attention(q, k, v, torch.ones(1, 2, 1, 5, dtype=torch.bool), 1.0) is None  # a mask for each head
        assert try_attention(*tensors(1, 1, 5, MAX_WIDTH + 1), None, 1.0) is None
        monkeypatch.setenv(library.SWITCH, "0")
        assert try_attention(q, k, v, None, 1.0) is None


@torch.inference_mode()
def test_softmax_attention_takes_it(monkeypatch):
    calls, run = [], attention.call
    monkeypatch.setattr(attention, "call", lambda *args: calls.append(args[0]) or run(*args))
    q, k, v = tensors(2, 2, 6, 8)
    got = softmax_attention(q, k, v, scale=0.5, mask=torch.ones(2, 6, dtype=torch.bool))
    assert calls == ["decode_attention"]
    monkeypatch.setenv(library.SWITCH, "0")
    torch.testing.assert_close(got, softmax_attention(q, k, v, scale=0.5))
    assert len(calls) == 1
