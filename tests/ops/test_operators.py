"""The registered operators: `opcheck`, derivatives of first and second order, one graph for every length, export."""

import importlib
import importlib.util
import itertools

import pytest
import torch
import torch._dynamo.testing

from polymix.ops.gated import linear_gated
from polymix.ops.native.library import why_not
from polymix.ops.padre import padre_step
from polymix.ops.pom import linear_powers, pom_pool, pom_scan
from polymix.ops.pooled import gate_tokens, linear_pairs, linear_scaled, moments, pooled_product
from polymix.ops.qt import qt_causal, qt_moments, qt_pool, qt_query, qt_spread
from tests.helpers import build, close, tokens

pytestmark = pytest.mark.slow
OPERATORS = {
    "pom_pool": pom_pool, "pom_scan": pom_scan, "pooled_product": pooled_product, "gate_tokens": gate_tokens,
    "qt_moments": qt_moments, "qt_query": qt_query, "qt_causal": qt_causal, "padre_step": padre_step,
    "linear_powers": linear_powers, "linear_pairs": linear_pairs, "linear_gated": linear_gated, "linear_scaled": linear_scaled,
    "moments": moments, "qt_pool": qt_pool, "qt_spread": qt_spread,
}  # fmt: skip
B, N, E, H, D = 2, 5, 4, 2, 3  # batch, tokens, features, heads, channels per head
MASK = torch.tensor([[True, False, True, True, False], [False] * 5])


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Use short chunks: at these sizes, padding the last chunk of the causal QT would be most of the work."""
    monkeypatch.setattr("polymix.ops.shared.causal_sums.CHUNK", 4)
    if importlib.util.find_spec("triton"):
        monkeypatch.setattr(importlib.import_module("polymix.ops.qt.triton_causal"), "CHUNK", 16)


def angles(axes):
    place = tokens(1, N, E // 2, seed=9)
    return place.cos(), place.sin(), axes


def pom_cases():
    h, alpha = tokens(B, N, E), tokens(E, 3, seed=1)
    order, first = torch.tensor([[1, 0, 3, 2, 4], [4, 3, 2, 1, 0]]), torch.tensor([[0, 0, 2, 2, 2], [0, 0, 0, 3, 3]])
    turned = {"rotary": angles(1), "rotary in 2-D": angles(2)}
    for name, act, mask, turns in (
        ("plain", "gelu", None, None), ("masked", "clamped_leaky_relu", MASK, None),
        ("rotary", "identity", MASK, turned["rotary"]), ("rotary in 2-D", "relu", None, turned["rotary in 2-D"]),
    ):  # fmt: skip
        cos, sin, axes = turns or (None, None, 1)
        yield f"pom_pool: {name}", (h, alpha, mask, cos, sin, act, axes)
        yield f"pom_scan: {name}", (h, alpha, None, mask, cos, sin, None, None, act, axes)
    yield "pom_scan: started", (h, alpha, tokens(B, E, seed=2), None, None, None, None, None, "gelu", 1)
    yield "pom_scan: segments", (h, alpha, None, MASK, None, None, order, first, "identity", 1)
    yield "pom_scan: ordered", (h, alpha, None, None, None, None, order, None, "gelu", 1)


def pooled_cases():
    k, v, p, gate = tokens(B, N, H, D), tokens(B, N, H, D, seed=1), tokens(H, N, seed=2), tokens(B, H, D, seed=3)
    for has_v, has_p in itertools.product((True, False), repeat=2):
        has_mask = has_v == has_p  # any two of the three meet in every way
        name = " ".join(word for word, has in (("v", has_v), ("p_2", has_p), ("mask", has_mask)) if has) or "k alone"
        yield f"pooled_product: {name}", (k, v if has_v else None, p if has_p else None, MASK if has_mask else None)
    yield "gate_tokens: means", (k, gate, None)
    yield "gate_tokens: positions", (k, gate, p)


def qt_cases():
    q, k, v = (tokens(B, H, N, D, seed=seed) for seed in range(3))
    alpha = 0.5 + tokens(3, H, 1, 1, seed=3).sigmoid()
    for (form, scale), order in itertools.product((("compact", alpha), ("full", None)), (0, 1, 2)):
        start = qt_moments.define(k, v, scale, None, form, order)
        yield f"qt_moments: {form} {order}", (k, v, scale, None, form, order)
        yield f"qt_query: {form} {order}", (q, start, scale, form, order)
        if order != 1:
            yield f"qt_causal: {form} {order}", (q, k, v, scale, None, None, form, order)
        if order == 2:
            yield f"qt_moments: {form}, masked", (k, v, scale, MASK, form, order)
            yield f"qt_causal: {form}, started", (q, k, v, scale, start, MASK, form, order)


def padre_cases():
    # Any two of form, bias and y meet in every way. `alike`: the cases with both of bias and y, and with neither.
    for name, grid, kernel, causal, dilation, alike in (
        ("1-D", (6,), (3,), False, 1, False), ("causal", (6,), (4,), True, 1, True), ("causal, dilated", (6,), (2,), True, 2, False), ("2-D", (2, 3), (3, 3), False, 1, True),
        ("3-D", (1, 2, 3), (1, 3, 3), False, 1, False),
    ):  # fmt: skip
        n = 6 + (dilation * (kernel[0] - 1) if causal else 0)
        x, weight = tokens(B, n, E), tokens(E, 1, *kernel, seed=1)
        bias, y = tokens(E, seed=2), tokens(B, 6, E, seed=3)
        for has_bias, has_y in ((True, True), (False, False)) if alike else ((True, False), (False, True)):
            extra = f"{', bias' if has_bias else ''}{', y' if has_y else ''}"
            args = (x, weight, bias if has_bias else None, y if has_y else None, list(grid), causal, dilation)
            yield f"padre_step: {name}{extra}", args


def linear_cases():
    x, weight, bias, p = tokens(B, N, E), tokens(6, E, seed=1), tokens(6, seed=2), tokens(H, N, seed=3)
    gate, last, last_bias = tokens(B, 6, seed=4), tokens(D, 6, seed=5), tokens(D, seed=6)
    yield "linear_powers: plain", (x, weight, None, None, "identity", 1)
    yield "linear_powers: masked, bias", (x, weight, bias, MASK, "gelu", 3)
    yield "linear_pairs: plain", (x, weight, None, None, None)
    yield "linear_pairs: p, mask, bias", (x, torch.cat((weight, weight[:2])), tokens(8, seed=2), p, MASK)
    yield "linear_gated: no last map", (x, weight, None, gate, None, None, None, "sigmoid")
    yield "linear_gated: all", (x, weight, bias, gate, p, last, last_bias, "sigmoid")
    square = tokens(E, E, seed=7)
    yield "linear_scaled: plain", (x, tokens(B, E, seed=8), weight, None, None)
    yield "linear_scaled: all", (x, tokens(B, E, seed=8), square, tokens(E, seed=9), torch.tensor(0.7).double())
    yield "moments: plain", (x, None)
    yield "moments: masked", (x, MASK)


def qt_linear_cases():
    x, weight, query = tokens(B, N, E), tokens(2 * E, E, seed=1), tokens(E, E, seed=2)
    least, last = torch.full((B,), 1e-3 * N, dtype=torch.float64), tokens(D, E, seed=3)
    for order, mask in ((0, None), (1, MASK), (2, None)):
        sums = qt_pool.define(x, weight, None, mask, H, order).abs()
        yield f"qt_pool: {order}", (x, weight, None, mask, H, order)
        yield f"qt_spread: {order}", (x, query, None, sums + 1.0, least, last, None)
    sums = qt_pool.define(x, weight, tokens(2 * E, seed=4), None, H, 2).abs()
    yield "qt_pool: all", (x, weight, tokens(2 * E, seed=4), MASK, H, 2)
    yield "qt_spread: all", (x, query, tokens(E, seed=5), sums + 1.0, least, last, tokens(D, seed=6))


CASES = dict(itertools.chain(pom_cases(), pooled_cases(), qt_cases(), padre_cases(), linear_cases(), qt_linear_cases()))
every_case = pytest.mark.parametrize("case", list(CASES))
IMPLS = {"eager": torch.float64, "triton": torch.float32, "native": torch.float32}


IN_C = ("linear_", "moments", "qt_pool", "qt_spread")  # operators with C kernels
IN_C_AND_TRITON = ("linear_powers",)


def runs(case):
    """The implementations of a case."""
    name, in_c = operator(case), operator(case).startswith(IN_C)
    native = in_c or (name == "padre_step" and "dilated" not in case and "3-D" not in case)
    native = native and why_not() is None
    return [impl for impl in IMPLS if {"native": native, "triton": not in_c or name in IN_C_AND_TRITON}.get(impl, True)]


def arguments(case, dtype=torch.float64, transposed=False):
    """The arguments of a case, with floating tensors as leaves; `transposed`: with another memory layout."""

    def leaf(value, place):
        if not isinstance(value, torch.Tensor) or not value.is_floating_point():
            return value
        value = value.to(dtype, copy=True)
        if transposed and value.ndim > 2:
            value = value.transpose(1, -1).contiguous().transpose(1, -1)
        return value.requires_grad_(place in OPERATORS[operator(case)].wrt)

    return tuple(leaf(value, place) for place, value in enumerate(CASES[case]))


def operator(case):
    return case.split(":")[0]


def run(case, args, impl):
    out = getattr(torch.ops.polymix, operator(case))(*args, impl)
    return out if isinstance(out, tuple) else (out,)


ELSEWHERE = {
    "linear_scan",
    "matrix_scan",
}  # not Operators; see test_selective_scan.py and test_delta_rule.py in tests/ops/related
# Cases with all optional arguments, for the slow checks, such as tracing with symbolic sizes.
LADEN = [
    "pom_pool: rotary in 2-D", "pom_scan: segments", "pooled_product: v p_2 mask", "gate_tokens: positions",
    "qt_moments: compact, masked", "qt_query: compact 2", "qt_causal: compact, started", "padre_step: 2-D, bias, y",
    "linear_powers: masked, bias", "linear_pairs: p, mask, bias", "linear_gated: all", "linear_scaled: all", "moments: masked",
    "qt_pool: all", "qt_spread: all",
]  # fmt: skip


OLD_NAMES = {"pooled_spread", "qt_ask"}  # they call the operators under their new names


def test_every_registered_operator_has_a_case():
    registered = {
        name.removeprefix("polymix::").split(".")[0]
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("polymix::")
    }
    held = {*OPERATORS, *(f"{name}_backward" for name in OPERATORS)}
    assert registered - ELSEWHERE - OLD_NAMES == held, "every operator must be checked by opcheck"
    assert {operator(case) for case in CASES} == {operator(case) for case in LADEN} == set(OPERATORS)


@pytest.mark.parametrize(("case", "impl"), [(case, impl) for case in CASES for impl in runs(case)])
def test_opcheck(case, impl):
    """With transposed tokens, the strides must be those of the fake implementation."""
    args = arguments(case, IMPLS[impl], transposed=True)
    tests = ("test_schema", "test_autograd_registration", "test_faketensor")
    if case in LADEN:
        tests += ("test_aot_dispatch_dynamic",)
    torch.library.opcheck(getattr(torch.ops.polymix, operator(case)).default, (*args, impl), test_utils=tests)
    grads = [torch.randn(y.shape, dtype=y.dtype) for y in run(case, args, impl)]
    plain = tuple(a.detach() if isinstance(a, torch.Tensor) else a for a in args)
    backward = getattr(torch.ops.polymix, operator(case) + "_backward").default
    torch.library.opcheck(backward, (grads, *plain, impl), test_utils=("test_schema", "test_faketensor"))


@every_case
def test_gradients_of_first_and_second_order(case):
    args, definition = arguments(case), OPERATORS[operator(case)]
    leaves = [place for place in definition.wrt if args[place] is not None]
    gradients = torch.autograd.grad(total(definition.define(*args)), [args[i] for i in leaves], allow_unused=True)
    wrt = [place for place, grad in zip(leaves, gradients, strict=True) if grad is not None]  # order 0 reads no q

    def function(*values):
        changed = list(args)
        for place, value in zip(wrt, values, strict=True):
            changed[place] = value
        return run(case, changed, "eager")

    values = tuple(args[place] for place in wrt)
    assert torch.autograd.gradcheck(function, values, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, values, fast_mode=True)


def total(out):
    return sum(y.square().sum() for y in (out if isinstance(out, tuple) else (out,)))


@every_case
def test_kernels_give_the_derivatives_of_the_definition(case):
    """The output, first derivatives by the backward kernels, and second derivatives with the forward kernels."""
    results = {}
    for impl in runs(case):
        args = arguments(case, torch.float32, transposed=True)
        leaves = [a for a in args if isinstance(a, torch.Tensor) and a.requires_grad]
        out = run(case, args, impl)
        first = torch.autograd.grad(total(out), leaves, retain_graph=True)
        slopes = torch.autograd.grad(total(out), leaves, create_graph=True)
        second = torch.autograd.grad(total(tuple(slopes)), leaves, allow_unused=True)
        results[impl] = (*out, *first, *(x if g is None else g for x, g in zip(leaves, second, strict=True)))
    for theirs in results.values():
        for ours, expected in zip(theirs, results["eager"], strict=True):
            assert (ours.shape, ours.dtype) == (expected.shape, expected.dtype)
            close(ours, expected, 1e-4)


MIXERS = {
    "padre": ("padre", {"degree": 3, "kernel_size": 3}),
    "padre-causal": ("padre", {"causal": True, "kernel_size": 3}),
    "pom": ("pom", {}),
    "pom-rotary": ("pom", {"rotary": "1d"}),
    "qt": ("qt", {"heads": 2}),
    "poly_sa": ("poly_sa", {"positions": "mean", "heads": 2}),
    "poly_nl": ("poly_nl", {"reduction": 2}),
}
# tests/mixers/test_numerics.py compiles every mixer without kernels; these tests check what "auto" puts in the graph.
COMPILED = [(name, "triton", False) for name in ("padre", "pom", "qt", "poly_sa", "poly_nl")]
COMPILED += [("pom", "triton", True), ("qt", "triton", True), ("pom", "auto", False), ("padre", "auto", False)]
NATIVE = ("padre", "padre-causal", "pom", "qt", "poly_sa", "poly_nl") if why_not() is None else ()
COMPILED += [(name, "native", False) for name in NATIVE]


def make(name, impl):
    kind, options = MIXERS[name]
    return build(kind, 8, impl=impl, **options).float()


@pytest.mark.parametrize(("name", "impl", "causal"), COMPILED)
def test_one_graph_for_every_length(name, impl, causal):
    torch._dynamo.reset()
    mixer, plain = make(name, impl), make(name, "eager")
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(mixer, fullgraph=True, dynamic=True, backend=counter)
    options = {"causal": True} if causal else {}
    graphs = []
    for n in (5, 9):
        x = tokens(2, n, 8, dtype=torch.float32).requires_grad_()
        ours, expected = compiled(x, **options), plain(x, **options)
        close(ours, expected, 1e-4)
        ours = torch.autograd.grad(ours.square().sum(), (x, *mixer.parameters()))
        expected = torch.autograd.grad(expected.square().sum(), (x, *plain.parameters()))
        for got, grad in zip(ours, expected, strict=True):
            assert torch.allclose(got, grad, rtol=1e-3, atol=1e-4 * max(grad.abs().max().item(), 1e-2))
        graphs.append(counter.frame_count)
    assert len(set(graphs)) == 1, "a new length must not compile again"


@pytest.mark.parametrize(("name", "impl"), [
    *((name, impl) for name in MIXERS for impl in ("auto", "eager", "triton")),
    *((name, "native") for name in NATIVE),
])  # fmt: skip
def test_export_with_a_dynamic_length(name, impl):
    mixer = make(name, impl).eval()
    length = torch.export.Dim("length", min=2, max=4096)
    program = torch.export.export(mixer, (tokens(2, 12, 8, dtype=torch.float32),), dynamic_shapes=({1: length},))
    x = tokens(2, 17, 8, dtype=torch.float32)
    close(program.module()(x), make(name, "eager")(x), 1e-4)
    kernels = [node for node in program.graph.nodes if "polymix" in str(node.target)]
    assert bool(kernels) == (impl in ("triton", "native")), (
        "a graph must contain plain PyTorch unless kernels are requested by name"
    )
