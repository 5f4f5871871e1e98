"""Kernels take addresses: whatever is not theirs must be an error, or plain PyTorch, before one is taken."""

import warnings

import pytest
import torch

import polymix
from polymix.errors import OptionError, PolymixError, ShapeError
from polymix.ops.pom import pom_pool, pom_scan
from polymix.ops.pooled import gate_tokens, pooled_product
from polymix.ops.qt import qt_causal, qt_moments, qt_query
from tests.ops.kernels import needs_it

B, N, D, E = 2, 6, 8, 12
MIXERS = {"padre": {}, "pom": {}, "qt": {}, "poly_nl": {}, "poly_sa": {"positions": "mean"}}


def floats(*shape, dtype=torch.float32):
    return torch.randn(*shape, dtype=dtype)


# Right arguments by operator, in the order of its schema.
RIGHT = {
    "padre_step": lambda: {"x": floats(B, N, D), "weight": floats(D, 1, 3), "bias": floats(D), "y": floats(B, N, D), "grid": [N],
                               "causal": False, "dilation": 1},
    "linear_powers": lambda: {"x": floats(B, N, D), "weight": floats(E, D), "bias": floats(E), "mask": torch.ones(B, N).bool(),
                                  "activation": "gelu", "degree": 2},
    "linear_pairs": lambda: {"x": floats(B, N, D), "weight": floats(2 * E, D), "bias": floats(2 * E), "p": floats(3, N),
                                 "mask": torch.ones(B, N).bool()},
    "linear_gated": lambda: {"x": floats(B, N, D), "weight": floats(E, D), "bias": floats(E), "gate": floats(B, E), "p": floats(3, N),
                                 "last": floats(5, E), "last_bias": floats(5), "activation": "relu"},
    "linear_scaled": lambda: {"x": floats(B, N, D), "scale": floats(B, D), "weight": floats(D, D), "bias": floats(D), "rest": floats(1)},
    "moments": lambda: {"x": floats(B, N, D), "mask": torch.ones(B, N).bool()},
    "qt_pool": lambda: {"x": floats(B, N, D), "weight": floats(2 * D, D), "bias": floats(2 * D), "mask": torch.ones(B, N).bool(),
                            "heads": 2, "order": 2},
    "qt_spread": lambda: {"x": floats(B, N, D), "weight": floats(D, D), "bias": floats(D), "moments": floats(B, 2, 9, 5),
                              "least": floats(B), "last": floats(5, D), "last_bias": floats(5)},
}  # fmt: skip
TERMS = {
    "mask": lambda: torch.ones(B, N).bool(),
    "cos": lambda: floats(B, N, E // 2),
    "sin": lambda: floats(B, N, E // 2),
}
HEADS = {"scale": lambda: floats(3, 2, 1, 1), "mask": lambda: torch.ones(B, N).bool()}
# The same of operators whose only kernel is Triton's.
IN_TRITON = {
    "pom_pool": lambda: {"h": floats(B, N, E), "alpha": floats(E, 2), **{key: make() for key, make in TERMS.items()},
                         "activation": "gelu", "axes": 2},
    "pom_scan": lambda: {"h": floats(B, N, E), "alpha": floats(E, 2), "start": floats(B, E),
                         **{key: make() for key, make in TERMS.items()}, "order": torch.arange(N).repeat(B, 1), "first": None,
                         "activation": "gelu", "axes": 1},
    "pooled_product": lambda: {"k": floats(B, N, 2, 4), "v": floats(B, N, 2, 4), "p_2": floats(2, N), "mask": HEADS["mask"]()},
    "gate_tokens": lambda: {"q": floats(B, N, 2, 4), "gate": floats(B, 2, 4), "p_1": floats(2, N)},
    "qt_moments": lambda: {"k": floats(B, 2, N, 4), "v": floats(B, 2, N, 4), "scale": HEADS["scale"](), "mask": HEADS["mask"](),
                           "form": "compact", "order": 2},
    "qt_query": lambda: {"q": floats(B, 2, N, 4), "moments": floats(B, 2, 15, 5), "scale": None, "form": "full", "order": 2},
    "qt_causal": lambda: {"q": floats(B, 2, N, 4), "k": floats(B, 2, N, 4), "v": floats(B, 2, N, 4), "scale": HEADS["scale"](),
                          "start": floats(B, 2, 5, 5), "mask": HEADS["mask"](), "form": "compact", "order": 1},
}  # fmt: skip


# Sizes that nothing else settles: a longer one is right too.
FREE = {("padre_step", "weight", 2), ("linear_pairs", "p", 0), ("linear_gated", "p", 0), ("linear_scaled", "x", 1),
        ("moments", "x", 2), ("qt_spread", "x", 1), ("pom_pool", "alpha", 1), ("pom_scan", "alpha", 1), ("qt_query", "q", 2)}  # fmt: skip


def call(name, arguments):
    return getattr(torch.ops.polymix, name)(*arguments.values(), "triton" if name in IN_TRITON else "native")


def wrong(name):
    """(what is wrong, a change of the right arguments) for every tensor: its sizes, rank, dtype; and for every number."""
    arguments = {**RIGHT, **IN_TRITON}[name]()
    for argument, value in arguments.items():
        if isinstance(value, torch.Tensor):
            for axis, size in enumerate(value.shape):
                if argument == next(iter(arguments)) and axis == 0:
                    continue  # any batch, if the others agree; checked through them
                if (name, argument, axis) not in FREE and argument != "rest":
                    yield (
                        f"{argument} longer in {axis}",
                        {argument: value.new_ones(*value.shape[:axis], size + 1, *value.shape[axis + 1 :])},
                    )
                yield (
                    f"{argument} empty in {axis}",
                    {argument: value.new_ones(*value.shape[:axis], 0, *value.shape[axis + 1 :])},
                )
            if argument != "rest":
                yield f"{argument} of another rank", {argument: value[None]}
            yield f"{argument} of integers", {argument: value.int()}
            if argument == next(iter(arguments)):
                yield "float64", {argument: value.double()}
            if argument == "x":
                yield "float16", {"x": value.half()}
    yield from {
        "padre_step": [("a longer grid", {"grid": [N + 1]}), ("another grid", {"grid": [2, 3]}), ("dilation", {"dilation": 2}),
                       ("causal", {"causal": True}), ("a y of another type", {"y": floats(B, N, D).bfloat16()}), ("no axis", {"grid": []})],
        "linear_powers": [("degree 0", {"degree": 0}), ("degree -1", {"degree": -1}), ("activation", {"activation": "selu"})],
        "linear_pairs": [("odd", {"weight": floats(5, D), "bias": floats(5), "p": None}), ("heads", {"p": floats(5, N)})],
        "linear_gated": [("heads", {"p": floats(5, N)}), ("activation", {"activation": ""})],
        "linear_scaled": [("rest", {"rest": floats(2)}), ("a narrower output with rest", {"weight": floats(4, D), "bias": floats(4)})],
        "qt_pool": [("order 3", {"order": 3}), ("no heads", {"heads": 0}), ("heads", {"heads": 3}), ("heads", {"heads": -1})],
        "qt_spread": [("order 3", {"moments": floats(B, 2, 13, 5)}), ("rows", {"moments": floats(B, 2, 8, 5)})],
        "pom_pool": [("activation", {"activation": "selu"}), ("axes", {"axes": 3}), ("cosines alone", {"sin": None}),
                     ("half a pair", {"h": floats(B, N, 10), "alpha": floats(10, 2), "cos": floats(1, N, 5), "sin": floats(1, N, 5)})],
        "pom_scan": [("a start of segments", {"first": torch.arange(N).repeat(B, 1)})],
        "qt_moments": [("order 3", {"order": 3}), ("form", {"form": "half"}), ("no scale", {"scale": None})],
        "qt_query": [("order 1", {"order": 1}), ("compact", {"form": "compact", "scale": HEADS["scale"]()})],
    }.get(name, [])  # fmt: skip


@needs_it
@pytest.mark.parametrize(("name", "what", "change"), [(name, *case) for name in RIGHT for case in wrong(name)],
                         ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_wrong_arguments_of_an_operator_are_typed_errors(name, what, change):
    """torch.ops.polymix is documented, and exported graphs call it: float16 or a short mask used to end in SIGSEGV."""
    with pytest.raises((ShapeError, OptionError), match=name):
        call(name, {**RIGHT[name](), **change})


def gradients_are_checked(name, arguments, outputs, impl):
    """Those of the outputs' shapes and types pass; those of others are errors."""
    backward = getattr(torch.ops.polymix, f"{name}_backward")
    assert backward([torch.ones_like(y) for y in outputs], *arguments.values(), impl)
    for gradients in ([y[..., :-1] for y in outputs], [y[None] for y in outputs], [y.long() for y in outputs]):
        with pytest.raises(ShapeError, match="gradient"):
            backward(gradients, *arguments.values(), impl)


@needs_it
@pytest.mark.parametrize("name", RIGHT)
def test_right_arguments_and_gradients_pass_and_wrong_gradients_do_not(name):
    arguments = RIGHT[name]()
    outputs = call(name, arguments)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients_are_checked(name, arguments, outputs, "native")
    empty = {key: value[:0] if isinstance(value, torch.Tensor) and value.shape[:1] == (B,) and key in
             ("x", "y", "mask", "gate", "scale", "moments", "least") else value for key, value in arguments.items()}  # fmt: skip
    for y in [call(name, empty)] if len(outputs) == 1 else call(name, empty):
        assert y.shape[0] == 0, "no samples are none, not an error"


@pytest.mark.parametrize(("name", "what", "change"), [(name, *case) for name in IN_TRITON for case in wrong(name)],
                         ids=lambda value: value if isinstance(value, str) else "")  # fmt: skip
def test_wrong_arguments_of_a_triton_kernel_are_typed_errors(name, what, change):
    """A GPU reads and writes past the end of a short tensor without a word."""
    pytest.importorskip("triton", reason="untested: Triton's launches")
    with pytest.raises((ShapeError, OptionError), match=name):
        call(name, {**IN_TRITON[name](), **change})


@pytest.mark.parametrize("name", IN_TRITON)
def test_right_arguments_of_a_triton_kernel_pass_and_wrong_gradients_do_not(name):
    pytest.importorskip("triton", reason="untested: Triton's launches")
    arguments = IN_TRITON[name]()
    outputs = call(name, arguments)
    eager = getattr(torch.ops.polymix, name)(*arguments.values(), "eager")
    torch.testing.assert_close(outputs, eager, rtol=1e-4, atol=1e-4)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    gradients_are_checked(name, arguments, outputs, "triton")


@pytest.mark.parametrize("operator", [pom_pool, pom_scan, pooled_product, gate_tokens, qt_moments, qt_query, qt_causal],
                         ids=lambda operator: operator.name)  # fmt: skip
def test_all_arguments_of_a_kernel_lie_on_one_device(operator):
    arguments = IN_TRITON[operator.name]()
    operator.signature.check(operator.name, "triton", arguments)
    for argument, value in list(arguments.items())[1:]:
        if isinstance(value, torch.Tensor):
            with pytest.raises(ShapeError, match=f"{operator.name}: {argument}.* on cpu, got a tensor on meta"):
                operator.signature.check(operator.name, "triton", {**arguments, argument: value.to("meta")})


@needs_it
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("change", [torch.nn.Module.half, torch.nn.Module.double], ids=["half", "double"])
def test_an_exported_graph_in_another_type_says_so(name, change):
    """The graph holds the operator by name; its weights may be converted afterwards."""
    mixer, x = polymix.create_mixer(name, D, impl="native", **MIXERS[name]), floats(B, 40, D)
    program = torch.export.export(mixer, (x,)).module()
    torch.testing.assert_close(program(x), mixer(x))
    change(program)
    x = x.half() if change is torch.nn.Module.half else x.double()
    with pytest.raises((PolymixError, RuntimeError), match=r"native|dtype"):
        program(x)


@pytest.mark.parametrize("impl", ["eager", "blocked", pytest.param("native", marks=needs_it)])
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float64, "meta"], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_no_implementation_allocates_by_the_user_s_defaults(name, impl, kind, masked):
    """A default type of bf16 used to make the C kernel of poly_nl write past its buffers."""
    mixer, x = polymix.create_mixer(name, D, impl=impl, **MIXERS[name]), floats(B, 600, D)
    mask = torch.ones(B, 600).bool() if masked and name not in ("padre", "poly_sa") else None
    if mask is not None:
        mask[1, 500:] = False
    with torch.no_grad():
        expected = mixer(x, mask=mask)
        try:
            torch.set_default_dtype(kind) if isinstance(kind, torch.dtype) else torch.set_default_device(kind)
            output = mixer(x, mask=mask)
        finally:
            torch.set_default_dtype(torch.float32)
            torch.set_default_device(None)
    torch.testing.assert_close(output, expected)


@pytest.mark.parametrize("name", MIXERS)
def test_a_jit_trace_holds_no_memory_of_the_call(name):
    """Traced under no_grad, an output that a kernel writes in place was recorded as a constant without meaning."""
    mixer, x = polymix.create_mixer(name, D, **MIXERS[name]).eval(), floats(B, 600, D)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        traced = torch.jit.trace(mixer, (x,), check_trace=False)
        torch.testing.assert_close(traced(x + 1), mixer(x + 1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", MIXERS)
def test_batched_gradients_see_plain_pytorch(name):
    """A batched gradient has no address (jacobian(vectorize=True), is_grads_batched, vmap over a backward)."""
    mixer, x = polymix.create_mixer(name, D, **MIXERS[name]), floats(B, 600, D).requires_grad_()
    y = mixer(x)
    grads = floats(3, *y.shape)
    (found,) = torch.autograd.grad(y, x, grads, is_grads_batched=True, retain_graph=True)
    expected = torch.stack([torch.autograd.grad(y, x, grad, retain_graph=True)[0] for grad in grads])
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
