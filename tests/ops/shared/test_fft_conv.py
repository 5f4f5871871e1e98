"""Convolutions by Fourier transforms against their defining sums."""

import pytest
import torch
import torch._dynamo.testing

from polymix.errors import ShapeError
from polymix.ops.shared.fft_conv import causal_fft_conv, circular_fft_conv, fft_size
from tests.helpers import close, tokens


def causal_sum(x, taps):
    y = torch.zeros(torch.broadcast_shapes(x.shape[:-1], taps.shape[:-1]) + x.shape[-1:], dtype=torch.float64)
    for n in range(x.shape[-1]):
        for t in range(min(taps.shape[-1], n + 1)):
            y[..., n] += taps[..., t] * x[..., n - t]
    return y


def circular_sum(x, taps):
    y = torch.zeros(torch.broadcast_shapes(x.shape[:-1], taps.shape[:-1]) + x.shape[-1:], dtype=torch.float64)
    for n in range(x.shape[-1]):
        for t in range(taps.shape[-1]):
            y[..., n] += taps[..., t] * x[..., (n - t) % x.shape[-1]]
    return y


BOTH = pytest.mark.parametrize(("conv", "by_sum"), [(causal_fft_conv, causal_sum), (circular_fft_conv, circular_sum)])


@pytest.mark.parametrize("n", [1, 2, 7, 8, 31, 64])
@pytest.mark.parametrize("length", [1, 2, 7, 64, 100])
@BOTH
def test_equals_the_sum(conv, by_sum, n, length):
    """Taps shorter and longer than the sequence, and leading axes that broadcast in both directions."""
    if conv is circular_fft_conv and length > n:
        return
    for head, other in (((3,), (3,)), ((2, 3), (3,)), ((2, 1, 4), (3, 1)), ((), (2,))):
        x, taps = tokens(*head, n), tokens(*other, length, seed=1)
        close(conv(x, taps), by_sum(x, taps), 1e-13)


@BOTH
def test_strided_inputs(conv, by_sum):
    x, taps = tokens(2, 9, 3), tokens(5, 3, seed=1)
    close(conv(x.transpose(1, 2), taps.t()), by_sum(x.transpose(1, 2), taps.t()), 1e-13)
    close(conv(tokens(3, 24)[:, ::2], taps.t()), by_sum(tokens(3, 24)[:, ::2], taps.t()), 1e-13)


@pytest.mark.parametrize(("n", "length"), [(6, 4), (1, 1), (4, 4), (3, 7)])
@BOTH
def test_first_and_second_derivatives(conv, by_sum, n, length):
    if conv is circular_fft_conv and length > n:
        return
    x, taps = tokens(2, 3, n).requires_grad_(), tokens(3, length, seed=1).requires_grad_()
    assert torch.autograd.gradcheck(conv, (x, taps))
    assert torch.autograd.gradgradcheck(conv, (x, taps))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@BOTH
def test_type_of_x_computed_in_float32(conv, by_sum, dtype):
    """Summing a thousand terms in bfloat16 would be much less exact than rounding the output."""
    x, taps = tokens(2, 1000).to(dtype), (tokens(1000, seed=1) / 30).to(dtype)
    y = conv(x, taps)
    assert y.dtype == dtype
    close(y.double(), conv(x.double(), taps.double()), {torch.float32: 1e-6}.get(dtype, torch.finfo(dtype).eps))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(conv(x, taps), y), "autocast must not change the transform"


@BOTH
def test_one_graph_for_every_length(conv, by_sum):
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(conv, fullgraph=True, dynamic=True, backend=counter)
    for n in (13, 29, 40, 9):
        x, taps = tokens(3, n).requires_grad_(), tokens(3, 5, seed=1).requires_grad_()
        y = compiled(x, taps)
        close(y, by_sum(x, taps), 1e-13)
        ours, plain = torch.autograd.grad(y.sum(), (x, taps)), torch.autograd.grad(conv(x, taps).sum(), (x, taps))
        for a, b in zip(ours, plain, strict=True):
            close(a, b, 1e-12)
    assert counter.frame_count == 1, "a new length must not compile again"


@pytest.mark.parametrize("same", [True, False])
@BOTH
def test_export_with_a_dynamic_length(conv, by_sum, same):
    """With taps of a fixed length, and with taps as long as the sequence."""

    class Module(torch.nn.Module):
        def forward(self, x, taps):
            return conv(x, taps)

    length = torch.export.Dim("length", min=6, max=4096)
    shapes = ({1: length}, {1: length} if same else None)
    program = torch.export.export(Module(), (tokens(3, 12), tokens(3, 12 if same else 5)), dynamic_shapes=shapes)
    x, taps = tokens(3, 29), tokens(3, 29 if same else 5, seed=1)
    close(program.module()(x, taps), by_sum(x, taps), 1e-13)


def test_sizes_are_quick_and_tight():
    for least in range(1, 2000):
        size = fft_size(least)
        assert size >= least
        assert size <= max(1.34 * least, 1)
        odd = size
        while odd % 2 == 0:
            odd //= 2
        assert odd in (1, 3, 5)


def test_errors_come_before_any_compute():
    x = tokens(2, 8)
    with pytest.raises(ShapeError, match="9 taps"):
        circular_fft_conv(x, tokens(2, 9))
    for bad in (tokens(2, 0), torch.ones(2, 3, dtype=torch.int64), torch.tensor(1.0)):
        with pytest.raises(ShapeError, match="taps"):
            causal_fft_conv(x, bad)
        with pytest.raises(ShapeError, match="`x`"):
            circular_fft_conv(bad, x)
    with pytest.raises(ShapeError, match="meta"):
        causal_fft_conv(x, x.to("meta"))
