"""A linear map of a few rows: the kernel against the formula in float64, and which calls it takes."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM, PolymixLlamaConfig, PolymixLlamaForCausalLM
from polymix.models.language.layers import RMSNorm
from polymix.ops.decode import ACTIVATIONS, MAX_ROWS, linear, try_linear, try_rms_norm
from polymix.ops.decode import rows as kernels
from polymix.ops.native import library
from polymix.structured.dense import apply_linear

pytestmark = pytest.mark.skipif(
    library.why_not() is not None, reason=f"untested: products of few rows in C: {library.why_not()}"
)
DTYPES = {torch.float32: 2e-6, torch.bfloat16: 5e-3}


def wrong(got, x, weight, bias, activation, factor):
    """The largest error over the largest value."""
    wide = [None if part is None else part.double() for part in (x, weight, bias, factor)]
    want = ACTIVATIONS[activation](F.linear(*wide[:3])) * (1 if factor is None else wide[3])
    return float((got.double() - want).abs().max() / want.abs().max())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size", "out"), [(1, 37, 19), (2, 16, 64), (3, 100, 17), (5, 64, 33), (32, 31, 50)])
def test_the_kernel_is_the_formula(dtype, rows, size, out):
    """Rows, inputs and outputs that fill no tile, for every activation, with and without bias and factor."""
    x, weight, bias, factor = (
        torch.randn(shape, dtype=dtype) for shape in ((rows, size), (out, size), (out,), (rows, out))
    )
    for activation in kernels.KINDS:
        for b, f in ((None, None), (bias, factor)):
            assert wrong(kernels.call_linear(x, weight, b, activation, f), x, weight, b, activation, f) < DTYPES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize(("rows", "size", "hidden"), [(1, 37, 19), (2, 64, 100), (7, 33, 65), (32, 31, 50)])
def test_a_network_is_its_maps(dtype, gated, rows, size, hidden):
    """Both maps, and the gate's, with and without biases; numbers of channels that fill no strip."""
    x = torch.randn(1, rows, size, dtype=dtype)
    shapes = [(hidden, size), (size, hidden), (hidden, size)][: 2 + gated]
    for biased in (False, True):
        maps = [(torch.randn(s, dtype=dtype) / 6, torch.randn(s[0], dtype=dtype) if biased else None) for s in shapes]
        wide = [(weight.double(), None if bias is None else bias.double()) for weight, bias in maps]
        for activation in ("gelu_tanh", "silu", "relu"):
            first = F.linear(x.double(), *wide[0])
            inner = ACTIVATIONS[activation]
            mixed = inner(F.linear(x.double(), *wide[2])) * first if gated else inner(first)
            want = F.linear(mixed, *wide[1])
            got = kernels.call_feed_forward(x, maps[0], maps[1], activation, *(maps[2:] or [None]))
            assert got.shape == x.shape
            assert (got - want).abs().max() <= 3 * DTYPES[dtype] * want.abs().max()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("rows", "size"), [(1, 7), (3, 64), (2, 1000)])
@torch.no_grad()
def test_a_norm_is_its_formula(dtype, rows, size):
    """Also of tokens as small as eps, and in the layer: with gradients, which the kernel does not record, and without."""
    norm = RMSNorm(size, eps=1e-3).to(dtype)
    torch.nn.init.normal_(norm.weight)
    for scale in (1.0, 1e-2):
        x = (scale * torch.randn(1, rows, size)).to(dtype)
        want = F.rms_norm(x.double(), (size,), norm.weight.double(), 1e-3)
        got = try_rms_norm(x, norm.weight, 1e-3)
        assert (got - want).abs().max() <= DTYPES[dtype] * want.abs().max()
        assert torch.equal(norm(x), got)
    assert try_rms_norm(x, norm.weight.double(), 1e-3) is None
    with torch.enable_grad():
        assert try_rms_norm(x, norm.weight, 1e-3) is None
        assert norm(x).requires_grad


@pytest.mark.parametrize("level", library.usable_levels())
def test_every_level_of_processors_agrees(level, monkeypatch):
    monkeypatch.setenv(library.SWITCH, level)
    library._library.cache_clear()
    try:
        x, weight = torch.randn(7, 70).bfloat16(), torch.randn(21, 70).bfloat16()
        assert wrong(kernels.call_linear(x, weight, None, "silu", None), x, weight, None, "silu", None) < 5e-3
    finally:
        library._library.cache_clear()


def test_rows_do_not_depend_on_each_other_or_on_the_threads():
    x, weight = torch.randn(9, 300), torch.randn(260, 300)
    x[4] = torch.nan
    before, threads = kernels.call_linear(x, weight, None, "gelu", None), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(kernels.call_linear(x, weight, None, "gelu", None).nan_to_num(), before.nan_to_num())
    finally:
        torch.set_num_threads(threads)
    assert before[4].isnan().all()
    assert before[torch.arange(9) != 4].isfinite().all()


def test_it_runs_where_it_is_faster_and_nowhere_else(monkeypatch):
    x, weight = torch.randn(2, 8, 256), torch.randn(256, 256)
    with torch.no_grad():
        assert try_linear(x, weight, None).shape == (2, 8, 256)
        assert try_linear(torch.randn(MAX_ROWS + 1, 256), weight, None) is None
        assert try_linear(x, weight[:255], None) is None, "a small weight"
        assert try_linear(x, weight.t(), None) is None, "a weight that is not contiguous"
        assert try_linear(x.double(), weight.double(), None) is None
        assert try_linear(x, weight.bfloat16(), None) is None
        assert try_linear(x[:0], weight, None) is None
        with torch.autocast("cpu", torch.bfloat16):
            assert try_linear(x, weight, None) is None
        monkeypatch.setenv(library.SWITCH, "0")
        assert try_linear(x, weight, None) is None
        assert torch.equal(linear(x, weight, None), F.linear(x, weight))
        monkeypatch.delenv(library.SWITCH)
        with pytest.raises(RuntimeError):
            linear(x[..., :255], weight, None)
    assert try_linear(x, weight, None) is None, "gradients are recorded"
    assert linear(x, weight.requires_grad_(), None).requires_grad


def test_layers_that_are_wrapped_or_observed_are_called():
    x, layer = torch.randn(1, 256), nn.Linear(256, 256)
    seen = []
    with torch.no_grad():
        plain = apply_linear(layer, x, "silu")
        layer.register_forward_hook(lambda *_: seen.append(1))
        torch.testing.assert_close(apply_linear(layer, x, "silu"), plain)
        wrapped = nn.Sequential(layer, nn.Identity())
        torch.testing.assert_close(apply_linear(wrapped, x, "silu"), plain)
    assert len(seen) == 2


@pytest.mark.parametrize("kind", ["gpt", "llama"])
def test_a_step_of_decoding_runs_the_kernel_in_every_layer(kind, monkeypatch):
    """Norm, mixer and feed-forward of both families: a step gives what one forward gives, by the kernel alone."""
    config, model = {
        "gpt": (PolymixGPTConfig, PolymixGPTForCausalLM),
        "llama": (PolymixLlamaConfig, PolymixLlamaForCausalLM),
    }[kind]
    torch.manual_seed(0)
    mixers = ["pom", "padre", "local", "qt:heads=8", "softmax", "pom:decay=4"]
    options = {"vocab_size": 300, "hidden_size": 256, "num_layers": 6, "num_heads": 8, "mixers": mixers}
    model, ids = model(config(**options)).eval(), torch.randint(300, (2, 12))
    calls, run, both = [], kernels.call_linear, kernels.call_feed_forward
    with torch.no_grad():
        whole = model(ids).logits
        cache = model(ids[:, :11], use_cache=True).past_key_values
        monkeypatch.setattr(kernels, "call_linear", lambda *args: calls.append("map") or run(*args))
        monkeypatch.setattr(kernels, "call_feed_forward", lambda *args: calls.append("network") or both(*args))
        last = model(ids[:, 11:], past_key_values=copy.deepcopy(cache)).logits
        # PoM's step is a kernel of its own, but not with the rotary positions of llama.
        assert calls.count("map") == {"gpt": 11, "llama": 14}[kind] + 1, "mixers, head"
        assert calls.count("network") == 6
        monkeypatch.setenv(library.SWITCH, "0")
        torch.testing.assert_close(last, model(ids[:, 11:], past_key_values=cache).logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(last[:, 0], whole[:, 11], rtol=1e-4, atol=1e-4)
