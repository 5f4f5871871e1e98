"""The convolution of one token in C, against the definition in float64, and which calls it takes."""

import pytest
import torch

from polymix.mixers import PadreConfig
from polymix.ops.decode import convolution
from polymix.ops.decode.convolution import try_convolution
from polymix.ops.native import library
from polymix.ops.shared.depthwise import depthwise_conv

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"untested: one token in C: {library.why_not()}")
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "width", "taps", "dilation"), [
    (1, 7, 2, 1), (2, 16, 11, 1), (3, 37, 4, 3), (16, 400, 11, 2),
])  # fmt: skip
@torch.inference_mode()
def test_it_is_the_definition(dtype, rows, width, taps, dilation):
    """Channels that fill no vector, more work than one thread takes, and the window of the next token."""
    x, weight = torch.randn(rows, 1, width).to(dtype), torch.randn(width, 1, taps).to(dtype)
    window = torch.randn(rows, dilation * (taps - 1), width)
    y, following = try_convolution(x, window, weight, dilation)
    seen = torch.cat((window.double(), x.double()), dim=1)
    want = depthwise_conv(seen, weight.double(), (1,), causal=True, dilation=dilation)
    assert y.dtype == dtype
    assert (y - want).abs().max() <= DTYPES[dtype] * want.abs().max()
    assert torch.equal(following, seen[:, 1:].float())


def test_it_takes_single_tokens_without_gradients_and_nothing_else(monkeypatch):
    x, window, weight = torch.randn(2, 1, 8), torch.randn(2, 4, 8), torch.randn(8, 1, 5)
    assert try_convolution(x, window, weight, 1) is None, "gradients are recorded"
    with torch.no_grad():
        assert try_convolution(x, window, weight, 1) is not None
        assert try_convolution(torch.randn(2, 2, 8), window, weight, 1) is None, "two tokens"
        assert try_convolution(x, window[:, 1:], weight, 1) is None, "a short window"
        assert try_convolution(x.double(), window.double(), weight.double(), 1) is None
        assert try_convolution(x, window, weight.bfloat16(), 1) is None
        assert try_convolution(x[:0], window[:0], weight, 1) is None
        monkeypatch.setenv(library.SWITCH, "0")
        assert try_convolution(x, window, weight, 1) is None


@torch.inference_mode()
def test_steps_of_padre_run_it(monkeypatch):
    """A step by the kernel and the same step without it agree, with a dilation and a bias."""
    mixer = PadreConfig(degree=3, causal=True, token="depthwise:dilation=2", kernel_size=4).build(24).eval()
    x, calls, run = torch.randn(2, 9, 24), [], convolution.call
    monkeypatch.setattr(convolution, "call", lambda *args: calls.append(args[0]) or run(*args))
    _, state = mixer.prefill(x[:, :8])
    got, after = mixer.step(x[:, 8:], state)
    assert calls == ["decode_convolution"] * len(state.windows), "every convolution"
    assert len(calls) > 3
    monkeypatch.setenv(library.SWITCH, "0")
    want, plain = mixer.step(x[:, 8:], state)
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(after.windows, plain.windows)
