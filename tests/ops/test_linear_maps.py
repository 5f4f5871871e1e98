"""The C kernels of linear maps and their pooling against the definition in float64, on odd sizes."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from polymix.errors import CapabilityError
from polymix.ops.gated import linear_gated
from polymix.ops.native import library
from polymix.ops.native.arrays import in_pairs
from polymix.ops.pom import linear_powers
from polymix.ops.pooled import linear_pairs, linear_scaled, moments
from polymix.ops.shared.blocks import slower_than_pytorch
from tests.helpers import tokens
from tests.ops.kernels import in_float64, relative_error

NATIVE = library.why_not()
needs_it = pytest.mark.skipif(NATIVE is not None, reason=f"untested: kernels in C: {NATIVE}")
SIZES = {  # batch, tokens, channels, width, output channels
    "one token": (1, 1, 1, 2, 1), "no vector": (3, 63, 17, 34, 5), "60": (2, 100, 60, 60, 60), "blocks": (1, 257, 48, 96, 48),
    "odd block": (2, 259, 20, 18, 33), "deep": (1, 130, 250, 40, 16), "no sample": (0, 5, 8, 4, 8),
}  # fmt: skip
every_size = pytest.mark.parametrize("size", list(SIZES))


def mask_of(batch, n):
    """A random mask; the second half of the samples has no real token."""
    mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(7)) < 0.6
    mask[batch // 2 :] = False
    return mask


def arguments(name, batch, n, dim, width, out, *, optional=True, activation="gelu", degree=2, heads=2):
    """An operator and its arguments; `optional`: with the arguments that may be None."""
    x, mask = tokens(batch, n, dim), mask_of(batch, n) if optional else None
    p = tokens(heads, n, seed=5) if optional else None

    def linear(rows, columns, seed):
        return tokens(rows, columns, seed=seed) / columns**0.5, tokens(rows, seed=seed + 1) if optional else None

    if name == "powers":
        return linear_powers, [x, *linear(width, dim, 1), mask, activation, degree]
    if name == "pairs":
        return linear_pairs, [x, *linear(2 * width, dim, 1), p, mask]
    if name == "gated":
        last = linear(out, width, 3) if optional else (None, None)
        return linear_gated, [x, *linear(width, dim, 1), tokens(batch, width, seed=6), p, *last, activation]
    if name == "scaled":
        rest = torch.tensor(0.7).double() if optional else None
        return linear_scaled, [x, tokens(batch, dim, seed=6), *linear(dim if optional else out, dim, 1), rest]
    return moments, [x + 3.0, mask]


NAMES = ("powers", "pairs", "gated", "scaled", "moments")
every_name = pytest.mark.parametrize("name", NAMES)


def as_type(args, dtype):
    return [a.to(dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def derivatives(operator, args, impl, rounded=torch.float32):
    """The outputs and the gradients, for cotangents rounded to the dtype `rounded`."""
    leaves = [a.detach().requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    out = operator(*leaves, impl=impl)
    out = out if isinstance(out, tuple) else (out,)
    cotangents = [tokens(*y.shape, seed=9 + i).to(rounded).to(y.dtype) for i, y in enumerate(out)]
    wrt = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
    return [*out, *torch.autograd.grad(out, wrt, cotangents, allow_unused=True)]


def agree(operator, args, bound=1e-5):
    args = as_type(args, torch.float32)
    found = (
        derivatives(operator, given, impl)
        for given, impl in ((args, "native"), (as_type(args, torch.float64), "eager"))
    )
    for ours, expected in zip(*found, strict=True):
        assert (ours.shape, ours.dtype) == (expected.shape, torch.float32)
        assert relative_error(ours, expected) < bound, "more than the rounding of float32 sums of float32 products"


@needs_it
@every_name
@every_size
@pytest.mark.parametrize("optional", [True, False])
def test_outputs_and_gradients(name, size, optional, fresh_memory_is_nan):
    agree(*arguments(name, *SIZES[size], optional=optional, heads=1 if SIZES[size][3] % 2 else 2))


@needs_it
@pytest.mark.parametrize("activation", ["identity", "gelu", "relu", "clamped_leaky_relu", "sigmoid", "hardsigmoid"])
def test_every_activation_at_every_degree(activation):
    for degree in (1, 2, 3, 5):
        operator, args = arguments("powers", 2, 70, 24, 20, 1, activation=activation, degree=degree)
        agree(operator, args)
    agree(*arguments("gated", 2, 70, 24, 20, 12, activation=activation))


@needs_it
@pytest.mark.parametrize("activation", ["gelu", "sigmoid", "relu", "clamped_leaky_relu", "hardsigmoid"])
def test_an_activation_far_from_zero(activation):
    """At the ends of fits and bounds: one value per token, mapped by the identity."""
    x = torch.tensor([-200.0, -90.0, -20.0, -5.7, -5.5, -1e-3, 0.0, 1e-3, 2.9, 5.5, 5.7, 6.5, 20.0, 90.0, 200.0])
    one = torch.ones(1, 1)
    args = [x.view(1, -1, 1), one, None, one, None, None, None, activation]
    ours, expected = (
        derivatives(linear_gated, given, impl)[:2] for given, impl in ((args, "native"), (in_float64(args), "eager"))
    )
    for got, exact in zip(ours, expected, strict=True):
        assert torch.allclose(got.double(), exact, rtol=1e-6, atol=5e-7), (got.flatten(), exact.flatten())


@needs_it
@every_name
@given(
    batch=st.integers(1, 3),
    n=st.integers(1, 300),
    dim=st.integers(1, 70),
    width=st.integers(1, 60),
    out=st.integers(1, 60),
)
def test_any_size(name, batch, n, dim, width, out):
    agree(*arguments(name, batch, n, dim, width, out, heads=1))


@pytest.mark.slow
@needs_it
def test_processors_with_other_vectors(vectors):
    """The code for vectors of four, eight and sixteen floats."""
    for name in NAMES:
        for size in SIZES.values():
            agree(*arguments(name, *size, heads=1))


@needs_it
@every_name
@pytest.mark.parametrize("dim", [48, 20])
def test_bf16_is_rounded_once(name, dim, processor):
    """Results per token are bfloat16, sums are float32, and the gradients of weights have the weights' dtype."""
    processor(amx=False, avx512=False)
    operator, args = arguments(name, 2, 150, dim, 32, dim)
    args = as_type(args, torch.bfloat16)
    results = (
        derivatives(operator, a, impl, torch.bfloat16)
        for a, impl in ((args, "native"), (as_type(args, torch.float64), "eager"))
    )
    for ours, expected in zip(*results, strict=True):
        assert torch.allclose(ours.double(), expected, rtol=2**-8, atol=1e-4 * expected.abs().max().item())


@needs_it
@every_name
@pytest.mark.parametrize("dim", [48, 21])
def test_products_in_bf16_are_as_exact_as_those_of_pytorch(name, dim, processor, vectors):
    """With processors that have them and, emulated, with all others. 151 tokens: a block with an odd number of them."""
    processor(amx=False, avx512=True)
    operator, args = arguments(name, 2, 151, dim, 34, dim)
    args = as_type(args, torch.bfloat16)
    native, eager, exact = (
        derivatives(operator, a, impl, torch.bfloat16)
        for a, impl in ((args, "native"), (args, "eager"), (as_type(args, torch.float64), "eager"))
    )
    for ours, plain, expected in zip(native, eager, exact, strict=True):
        error, allowed = relative_error(ours, expected), 1.5 * relative_error(plain, expected)
        assert error <= max(allowed, 2**-8), f"{error:.1e} > {allowed:.1e}"


@needs_it
@pytest.mark.parametrize("name", ["powers", "pairs"])
def test_maps_of_tokens_lose_nothing_in_bf16(name, processor, vectors):
    """Tokens and weights are in bf16 already: their products are exact, and summed in float32."""
    operator, args = arguments(name, 2, 151, 48, 34, 48)
    args = as_type(args, torch.bfloat16)
    expected = operator(*as_type(args, torch.float64), impl="eager")
    processor(amx=False, avx512=True)
    assert in_pairs(args[0], args[1]) and not in_pairs(args[0], args[1].float())
    assert relative_error(operator(*args, impl="native"), expected) < 1e-5
    processor(amx=False, avx512=False)
    assert not in_pairs(args[0], args[1])


@needs_it
@every_name
def test_any_layout_of_the_tokens(name):
    """Slices of a wider array, every other token, transposed tokens, one sample for all."""
    operator, args = arguments(name, 2, 130, 32, 16, 32)
    args = as_type(args, torch.float32)
    expected = derivatives(operator, as_type(args, torch.float64), "eager")
    changes = (
        lambda x: torch.cat((x, x, x), -1)[..., 32:64],
        lambda x: x.repeat_interleave(2, 1)[:, ::2],
        lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        lambda x: torch.cat((x.new_zeros(1), x.flatten()))[1:].view(x.shape),  # not aligned to a vector
    )
    for change in changes:
        changed = [change(args[0]), *args[1:]]
        for ours, exact in zip(derivatives(operator, changed, "native"), expected, strict=True):
            assert relative_error(ours, exact) < 1e-5
    one = [args[0][:1].expand(3, -1, -1), *(a[:1].expand(3, -1) if a is not None and a.shape[:1] == (2,) and a.ndim == 2 else a
           for a in args[1:] if not isinstance(a, (str, int))), *(a for a in args[1:] if isinstance(a, (str, int)))]  # fmt: skip
    if name in ("powers", "moments"):
        out = operator(*one, impl="native")
        assert all(torch.equal(y[0], y[2]) for y in (out if isinstance(out, tuple) else (out,)))


@needs_it
@every_name
def test_any_layout_of_the_gradient_and_unchanged_inputs(name):
    """The kernels must work on copies, not on their inputs."""
    operator, args = arguments(name, 2, 130, 32, 16, 32, optional=name != "gated")  # gated: without a projection
    args = as_type(args, torch.float32)
    copies = [a.clone() if isinstance(a, torch.Tensor) else a for a in args]
    leaves = [a.requires_grad_() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    out = operator(*leaves, impl="native")
    out = out[0] if isinstance(out, tuple) else out
    cotangent = tokens(*reversed(out.shape), seed=2, dtype=torch.float32).permute(*reversed(range(out.ndim)))
    before = cotangent.clone()
    wrt = [a for a in leaves if isinstance(a, torch.Tensor) and a.requires_grad]
    ours = torch.autograd.grad(out, wrt, cotangent, retain_graph=True)
    again = torch.autograd.grad(out, wrt, cotangent.contiguous())
    assert all(torch.equal(a, b) for a, b in zip(ours, again, strict=True)), "results must be reproducible to the bit"
    assert torch.equal(cotangent, before)
    assert all(torch.equal(a, b) for a, b in zip(args, copies, strict=True) if isinstance(a, torch.Tensor))


@needs_it
@every_name
def test_any_number_of_threads(name):
    """Also more threads than blocks. Sums over tokens do not depend on the number of threads."""
    operator, args = arguments(name, 3, 400, 40, 32, 40)
    args, results, before = as_type(args, torch.float32), [], torch.get_num_threads()
    try:
        for threads in (1, 2, 3, 17):
            torch.set_num_threads(threads)
            results.append(derivatives(operator, args, "native"))
    finally:
        torch.set_num_threads(before)
    for other in results[1:]:
        assert all(relative_error(a, b.double()) < 1e-5 for a, b in zip(results[0], other, strict=True))
        if name != "moments":
            assert torch.equal(results[0][0], other[0])


@needs_it
def test_many_blocks_are_summed_in_double():
    """With a million ones, sequential float32 sums would stop at 2²⁴."""
    x = torch.ones(1, 1 << 20, 1)
    args = [x, torch.ones(1, 1), torch.full((1,), 30.0), None, "identity", 1]
    assert linear_powers(*args, impl="native").item() == 31 * 2**20


@needs_it
def test_padding_is_not_read():
    """NaN at padding must not reach a sum or a gradient; the gradient of padding is zero."""
    for name in ("powers", "pairs", "moments"):
        operator, args = arguments(name, 2, 150, 24, 16, 24)
        args = as_type(args, torch.float32)
        hidden = ~args[-1 if name != "powers" else 3]
        clean = derivatives(operator, [args[0].masked_fill(hidden[..., None], 0.0), *args[1:]], "native")
        with_nan = derivatives(operator, [args[0].masked_fill(hidden[..., None], torch.nan), *args[1:]], "native")
        outputs = 2 if name == "moments" else 1
        assert all(torch.equal(a, b) for a, b in zip(with_nan[:outputs], clean[:outputs], strict=True)), name
        assert (clean[outputs][hidden] == 0).all(), name


@needs_it
def test_a_profile_sees_the_kernels():
    operator, args = arguments("powers", 1, 9, 8, 8, 8)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        derivatives(operator, as_type(args, torch.float32), "native")
    seen = {event.key for event in profile.key_averages()}
    assert {"polymix::linear_powers", "polymix::linear_powers_backward"} <= seen


@needs_it
@every_name
def test_a_dispatch_mode_sees_an_operator(name):
    """Modes that observe operators, such as counters and tracers, must see the kernels' operators."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Seen(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.names.add(str(func))
            return func(*args, **(kwargs or {}))

    operator, args = arguments(name, 1, 9, 8, 8, 8)
    with Seen() as seen:
        seen.names = set()
        derivatives(operator, as_type(args, torch.float32), "native")
    name = "moments" if name == "moments" else f"linear_{name}"
    assert {f"polymix.{name}.default", f"polymix.{name}_backward.default"} <= seen.names


def test_a_missing_kernel_raises():
    operator, args = arguments("pairs", 1, 9, 8, 8, 8)
    with pytest.raises(CapabilityError, match="'triton' for linear_pairs"):
        operator(*as_type(args, torch.float32), impl="triton")


@pytest.mark.parametrize("has_them", [False, True])
def test_kernels_are_slower_where_they_lack_the_bf16_products_of_the_processor(has_them, bf16_products, monkeypatch):
    monkeypatch.setattr(library, "multiplies_bf16", lambda: has_them)
    assert slower_than_pytorch(torch.zeros(1)) is None
    why = slower_than_pytorch(torch.zeros(1, dtype=torch.bfloat16))
    assert (why is not None and "lack the bfloat16 products" in why) == (bf16_products and not has_them)
