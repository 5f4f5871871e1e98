"""A backward kernel does no work for gradients that nobody asks for, such as those of frozen weights."""

import importlib
import inspect
import itertools

import pytest
import torch

from polymix.errors import OptionError
from polymix.ops.native import library
from polymix.ops.padre import padre_step
from polymix.ops.qt import qt_pool, qt_spread
from tests.helpers import tokens
from tests.ops.kernels import needs_it, relative_error
from tests.ops.padre import test_native as padre
from tests.ops.qt import test_native as qt
from tests.ops.test_linear_maps import arguments

pytestmark = needs_it
OPERATORS = {name: arguments(name, 2, 70, 24, 20, 24) for name in ("powers", "pairs", "gated", "scaled", "moments")}
OPERATORS |= {
    "padre_step": (padre_step, padre.arguments(2, (5, 7), (3, 3), 24, False)),
    "qt_pool": (qt_pool, qt.pooling(2, 70, 24, 2, 2)), "qt_spread": (qt_spread, qt.spreading(2, 70, 24, 2, 2)),
}  # fmt: skip


def float32(args):
    return [a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]


def gradients(operator, args, wanted):
    """The gradients of the arguments at `wanted`, when nothing else has one."""
    leaves = [a.clone().requires_grad_() if i in wanted else a for i, a in enumerate(args)]
    out = operator(*leaves, impl="native")
    out = out if isinstance(out, tuple) else (out,)
    return torch.autograd.grad(out, [leaves[i] for i in wanted], [tokens(*y.shape, seed=9).to(y) for y in out])


@pytest.mark.parametrize("name", OPERATORS)
def test_any_choice_of_gradients_gives_those_of_all(name):
    operator, args = OPERATORS[name][0], float32(OPERATORS[name][1])
    present = [i for i in operator.wrt if args[i] is not None]
    everything = dict(zip(present, gradients(operator, args, present), strict=True))
    for number in range(1, len(present)):
        for expected in itertools.combinations(present, number):
            for position, grad in zip(expected, gradients(operator, args, expected), strict=True):
                assert relative_error(grad, everything[position]) < 1e-6, (operator.names[position], expected)


# What is asked for without x, and without the weights: C functions, and for each the arguments that must be NULL.
WITHOUT_X = {"powers": (4,), "pairs": (5,), "gated": (6,), "scaled": (5,), "qt_pool": (4,), "qt_spread": (6,)}
WITHOUT_WEIGHTS = {
    "powers": (5, 6), "pairs": (6, 7), "gated": (7, 8, 11, 12), "scaled": (7, 8), "qt_pool": (5, 6), "qt_spread": (7, 8, 10, 11),
}  # fmt: skip


@pytest.fixture
def asked(monkeypatch):
    """The calls of C functions, as (name, arguments)."""
    calls = []

    def record(name, *args):
        calls.append((name, args))
        return library.call(name, *args)

    for module in ("pom", "gated", "pooled", "qt", "padre"):
        monkeypatch.setattr(importlib.import_module(f"polymix.ops.{module}.native"), "call", record)
    return calls


@pytest.mark.parametrize(("frozen", "table"), [("x", WITHOUT_X), ("weights", WITHOUT_WEIGHTS)])
@pytest.mark.parametrize("name", WITHOUT_X)
def test_kernels_are_not_asked_for_the_gradients_of_frozen_arguments(name, frozen, table, asked):
    operator, args = OPERATORS[name][0], float32(OPERATORS[name][1])
    of_weights = [i for i in operator.wrt if operator.names[i] in ("weight", "bias", "last", "last_bias")]
    expected = of_weights if frozen == "x" else [i for i in operator.wrt if i not in of_weights]
    gradients(operator, args, expected)
    (call,) = [arguments for name, arguments in asked if name.endswith("_backward")]
    assert all(call[place] is None for place in table[name])
    other = (WITHOUT_WEIGHTS if frozen == "x" else WITHOUT_X)[name]
    assert all(call[place] is not None for place in other), "the gradients that are needed must be computed"


def test_a_frozen_convolution_takes_one_pass_less(asked):
    args = float32(OPERATORS["padre_step"][1])
    gradients(padre_step, args, [0])
    assert [name for name, _ in asked] == ["depthwise", "depthwise"], "the forward, and the gradient of x"
    asked.clear()
    gradients(padre_step, args, [1])
    assert [name for name, _ in asked] == ["depthwise", "depthwise_weight"]
    asked.clear()
    gradients(padre_step, args, [2])
    assert asked[-1][1][3] is None, "a bias alone needs no gradient of the taps"


def test_the_dispatcher_passes_on_what_is_needed(asked):
    """Under a dispatch mode, the backward is an operator with an argument `needs`."""
    from torch.utils.flop_counter import FlopCounterMode

    operator, args = OPERATORS["powers"][0], float32(OPERATORS["powers"][1])
    plain = gradients(operator, args, [0])
    with FlopCounterMode(display=False):
        counted = gradients(operator, args, [0])
    assert torch.equal(plain[0], counted[0]) and asked[-1][1][5] is None


def test_needs_of_another_length_are_an_error():
    args = float32(OPERATORS["powers"][1])
    backward = torch.ops.polymix.linear_powers_backward
    with pytest.raises(OptionError, match=r"needs.*3"):
        backward([torch.ones(2, 2, 20)], *args, "native", needs=[True])
    assert len(backward([torch.ones(2, 2, 20)], *args, "native", needs=[False, True, False])) == 1
    assert len(backward([torch.ones(2, 2, 20)], *args, "eager", needs=[False, True, True])) == 2


def test_every_backward_kernel_takes_needs():
    for operator, _ in OPERATORS.values():
        kernel = operator._kernel("native", "_backward")
        assert "needs" in inspect.signature(kernel).parameters, operator.name
