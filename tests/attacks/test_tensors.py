"""Tensors that hold no plain numbers, in every argument of every mixer: an error of ours, or a right result."""

from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.masked import masked_tensor

import polymix
from polymix.errors import PolymixError, shown
from polymix.mixers.registry import config_class
from polymix.train.registry import domains, recipe_class
from tests.attacks.test_python import buildable, fails
from tests.contracts.mixer_cases import CASES

X = torch.randn(2, 12, 12, generator=torch.Generator().manual_seed(0))
MASK = torch.ones(2, 12, dtype=torch.bool)
IDS = torch.zeros(2, 12, dtype=torch.int64)


def odd(x):
    """Tensors of the shape of x that are none of numbers in memory."""
    yield "nested", torch.nested.nested_tensor([*x])
    yield "jagged", torch.nested.nested_tensor([*x], layout=torch.jagged)
    for layout in (torch.sparse_coo, torch.sparse_csr, torch.sparse_bsr):
        kwargs = {"blocksize": (1, 1)} if layout is torch.sparse_bsr else {}
        yield str(layout), x.to_sparse(layout=layout, **kwargs) if layout is not torch.sparse_coo else x.to_sparse()
    yield "lazy", nn.UninitializedParameter()
    yield "lazy buffer", nn.UninitializedBuffer()
    yield "fake", FakeTensorMode().from_tensor(x)
    yield "masked", masked_tensor(x, torch.ones_like(x, dtype=torch.bool))
    yield "meta", x.to("meta")
    yield "complex", x.to(torch.complex64)
    if x.dtype == torch.float32:
        yield "quantised", torch.quantize_per_tensor(x, 0.1, 0, torch.qint8)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", CASES)
def test_tensors_without_plain_numbers_in_every_argument(case):
    """PyTorch's own errors of them name neither the argument nor what to do."""
    name, options = CASES[case]
    mixer, rows = polymix.create_mixer(name, 12, **options), []
    context = (X,) * mixer.contexts if mixer.needs_context else ()
    calls = {
        "x": (X, lambda v: mixer(v, *context)), "mask": (MASK, lambda v: mixer(X, *context, mask=v)),
        "context": (X, lambda v: mixer(X, v)), "values": (X, lambda v: mixer(X, values=v)),
        "segments": (IDS, lambda v: mixer(X, *context, segments=v)), "pairs of masks": (
            torch.ones(2, 12, 12, dtype=torch.bool), lambda v: mixer(X, *context, mask=v)),
        "prefill x": (X, mixer.prefill), "prefill mask": (MASK, lambda v: mixer.prefill(X, mask=v)),
        "step": (X[:, 0], mixer.step), "step of one": (X[:, :1], mixer.step), "map": (X[..., None], mixer),
        "explain": (X, lambda v: polymix.explain(mixer, v)),
    }  # fmt: skip
    for argument, (right, call) in calls.items():
        for kind, value in odd(right):
            fails(lambda c=call, v=value: c(v), rows, f"{argument} {kind}", lambda result: False)
    assert not rows


class Unequal:
    """An object that cannot be compared, as an array or a tensor cannot."""

    def __eq__(self, other):
        raise RuntimeError("no comparison")

    __hash__ = None


class Unprintable:
    def __repr__(self):
        raise RuntimeError("no text")


ODD = {
    "digits": 10**4300, "negative digits": -(10**4300), "digits in a tuple": (10**4300, 3), "digits as text": "1" * 4301,
    "array": np.arange(3), "empty array": np.array([]), "array of one": np.array([3]), "numpy int": np.int64(3), "numpy bool": np.True_,
    "1e308": 1e308, "-1e308": -1e308, "pair of 1e308": (1e308, 1e308), "unequal": Unequal(), "unequal in a tuple": (Unequal(),),
    "unprintable": Unprintable(), "generator": (i for i in ()), "mappingproxy": MappingProxyType({}), "module": nn.Identity(),
    "parameter": nn.Parameter(torch.ones(2)), "lazy": nn.UninitializedParameter(), "surrogate": "\ud800", "null": "\0", "lock": print,
}  # fmt: skip


@pytest.mark.parametrize("name", polymix.list_mixers())
def test_values_that_cannot_be_compared_printed_or_held(name, monkeypatch):
    """The check of an option, or the message of it, must not fail itself."""
    monkeypatch.setattr("polymix.limits.memory_of", lambda device="cpu": 2**28)
    rows, options = [], buildable(name)
    mixer = polymix.create_mixer(name, 8, **options)
    x = X[..., :8]
    for label, value in ODD.items():
        for option in config_class(name).annotations():
            fails(lambda o=option, v=value: polymix.create_mixer(name, 8, **{**options, o: v}), rows, f"{option}={label}",
                  lambda built, v=value: finite(built, x))  # fmt: skip
        for argument in ("context", "mask", "causal", "grid", "segments", "values"):
            fails(
                lambda a=argument, v=value: mixer(x, **{a: v}),
                rows,
                f"{argument}={label}",
                lambda y: y.shape == x.shape,
            )
        for method in ("cost", "matrices"):
            fails(
                lambda m=method, v=value: getattr(mixer, m)(v),
                rows,
                f"{method}(n={label})",
                lambda result, n=label: n == "numpy int",
            )
            fails(
                lambda m=method, v=value: getattr(mixer, m)(12, grid=v),
                rows,
                f"{method}(grid={label})",
                lambda result: False,
            )
            fails(
                lambda m=method, v=value: getattr(mixer, m)(12, dtype=v),
                rows,
                f"{method}(dtype={label})",
                lambda result: False,
            )
        for argument in ("dim", "device", "dtype"):
            fails(lambda a=argument, v=value: polymix.create_mixer(**{"name": name, "dim": 8, **options, a: v}), rows,
                  f"{argument}={label}", lambda built, n=label: n == "numpy int")  # fmt: skip
        fails(lambda v=value: mixer(v), rows, f"x={label}", lambda y: False)
        fails(lambda v=value: mixer.prefill(x, v), rows, f"state={label}", lambda y: False)
        fails(lambda v=value: mixer.step(x[:, 0], v), rows, f"step state={label}", lambda y: False)
        fails(lambda v=value: mixer.step(x[:, 0], causal=v), rows, f"step causal={label}", lambda y: False)
    fails(lambda: polymix.create_mixer(ODD["digits as text"], 8), rows, "name")
    assert not rows


@pytest.mark.parametrize("domain", sorted(domains()))
@pytest.mark.filterwarnings("ignore")  # of tensors that pydantic asks for a number
def test_every_option_of_every_domain_with_such_values(domain):
    """Huge numbers made a search for a divisor run for ever, and a message of them fail."""
    recipe, rows = recipe_class(domain), []
    huge = {"2**31": 2**31, "2**62": 2**62, "2**70": 2**70, "-2**70": -(2**70), "pair of 2**70": (2**70, 2**70)}
    for option in recipe.model_fields:
        for label, value in {**ODD, **huge, "dict of digits": {"a": 10**4300}}.items():
            fails(lambda o=option, v=value: recipe(**{o: v}).to_dict(), rows, f"{option}={label}",
                  lambda options, v=value, o=option: not isinstance(v, int) or (abs(v) < 2**63 and (
                      isinstance(options[o], float) or v < 2**31 or o == "seed")))  # fmt: skip
    assert not rows


def finite(mixer, x):
    """A mixer that was built can be called, and does not overflow at once."""
    try:
        context = (x,) * mixer.contexts if mixer.needs_context else ()
        return bool(mixer(x, *context).isfinite().all())
    except PolymixError:  # built for another grid
        return True


@pytest.mark.parametrize("case", CASES)
def test_grids_of_calls_costs_and_matrices_are_those_of_the_tokens(case):
    """(3.0, 4.0) and (True, 12) are equal to grids of integers, also as keys of what was checked before."""
    name, options = CASES[case]
    mixer, rows = polymix.create_mixer(name, 12, **options), []
    context = (X,) * mixer.contexts if mixer.needs_context else ()
    for grid in ((3, 4), (1, 12), (12,), (3, 2, 2)):
        for call in (lambda g=grid: mixer(X, *context, grid=g), lambda g=grid: mixer.cost(12, grid=g)):
            fails(call, rows, f"grid={grid}")
    wrong = ((3.0, 4.0), (True, 12), (12, True), (4, 4), (-3, -4), "3x4", (i for i in (3, 4)), (3, 4, 1, 1), [], (0, 12), 12, {3: 4},
             (12.0,), (np.int64(3), 4), (np.float64(3), 4), (torch.tensor(3), 4), ("3", 4), (10**4300, 1))  # fmt: skip
    for grid in wrong:
        for method in (
            lambda g: mixer(X, *context, grid=g),
            lambda g: mixer.cost(12, grid=g),
            lambda g: mixer.matrices(12, grid=g),
        ):
            fails(lambda m=method, g=grid: m(g), rows, f"grid={shown(grid)}", lambda result: False)
    assert not rows
