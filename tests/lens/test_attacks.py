"""Every verb of the lens refuses in our words what it cannot measure, and says nothing of what is no function."""

import math
from functools import partial

import pytest
import torch
from torch import nn

from polymix import lens
from polymix.errors import OptionError, PolymixError, ShapeError
from polymix.lens import PolynomialLayer, WeightTensor
from tests.helpers import build

SHAPE, HUGE = (1, 3, 2), 10**12
VERBS = {
    "degree": lens.degree, "interactions": lambda module, **kw: lens.interactions(module, 2, **kw),
    "receptive_field": lens.receptive_field, "equivariance": lens.equivariance,
    "contextual_mapping": lens.contextual_mapping, "tensor": lambda module, **kw: lens.tensor(module, 1, **kw),
    "distance": lambda module, **kw: lens.distance(module, torch.sin, draws=8, **kw),
    "fit": PolynomialLayer.fit, "overview": lens.overview,
}  # fmt: skip
STRANGE = [None, True, "2", -1, 0, HUGE, 2**70, math.nan, [], (1,), 1j, torch.ones(2), torch.full(SHAPE, math.nan),
           torch.ones(SHAPE).long(), torch.ones(1, 0, 2), torch.ones(SHAPE, device="meta"), torch.ones(SHAPE).to_sparse(),
           torch.ones(1, 3, 2, 2), object(), {}]  # fmt: skip
OPTIONS = {
    "degree": ("x", "shape", "max_degree", "max_rational", "lines", "seed", "mask", "grid", "unknown"),
    "interactions": ("x", "output", "draws", "grid"), "receptive_field": ("draws",), "equivariance": ("draws", "grid"),
    "contextual_mapping": ("draws",), "tensor": ("tokens",),
    "distance": ("p", "low", "high", "draws", "seed", "unknown"),
    "fit": ("source", "form", "rank", "block", "keep", "masks", "tokens", "seed"), "overview": ("order",),
}  # fmt: skip


FACTOR = torch.ones(3, 2, 3, 2)
LINEAR = WeightTensor(1, FACTOR)


class Raises(nn.Module):
    def forward(self, x):
        raise KeyError("boom")


NO_FUNCTIONS = {
    "raises": Raises(), "meta": nn.Linear(2, 2, device="meta"), "None": None, "a name": "pom", "a class": nn.Linear,
    "a dictionary": lambda x: {"a": x}, "arrays": lambda x: x.numpy(), "another device": lambda x: x.to("meta"),
    "sparse": lambda x: x.to_sparse(), "petabytes": lambda x: x.expand(10**14, *x.shape[1:]),
}  # fmt: skip


def refused(call):
    """`call` gives a result, or an error of this package."""
    try:
        call()
    except PolymixError:
        return True
    return False


@pytest.mark.parametrize("verb", list(OPTIONS))
def test_no_value_of_an_option_gives_an_error_of_python_or_pytorch(verb):
    module = build("poly_nl", 2)
    calls = {
        "distance": lambda **kw: lens.distance(module, module, **{"draws": 8, **kw}),
        "fit": lambda source=LINEAR, **kw: PolynomialLayer.fit(source, **{"form": "tucker", "rank": 1, **kw}),
    }  # fmt: skip
    for option in OPTIONS[verb]:
        call = calls.get(verb, lambda **kw: VERBS[verb](module, **kw))
        refusals = sum(refused(partial(call, **{option: value})) for value in STRANGE)
        assert refusals > 5, f"{verb} takes nearly anything as {option}"


@pytest.mark.parametrize("verb", list(VERBS))
@pytest.mark.parametrize("module", list(NO_FUNCTIONS))
def test_what_is_no_function_of_tensors_is_refused(verb, module):
    with pytest.raises(PolymixError):
        VERBS[verb](NO_FUNCTIONS[module], shape=SHAPE)


@pytest.mark.parametrize("verb", [verb for verb in VERBS if verb not in ("degree", "overview")])
@pytest.mark.parametrize(("module", "says"), [
    (torch.rand_like, "second call|different outputs"), (lambda x: x[:, :0], "at least one number|no output"),
])  # fmt: skip
def test_nothing_is_said_of_what_differs_from_call_to_call_or_is_empty(verb, module, says):
    """Equivariance held for random outputs, whose noise was its tolerance. `degree` says so in its verdict."""
    with pytest.raises(OptionError, match=says):
        VERBS[verb](module, shape=SHAPE)


@pytest.mark.parametrize("verb", ["equivariance", "contextual_mapping", "distance"])
def test_no_size_is_told_of_what_is_not_finite(verb):
    """max(0, nan) is 0: equivariance held."""
    with pytest.raises(OptionError, match="not finite"):
        VERBS[verb](lambda x: x / 0, shape=SHAPE)


@pytest.mark.parametrize("verb", ["degree", "receptive_field", "interactions", "contextual_mapping"])
def test_a_function_may_write_to_its_input(verb):
    """The second call on the same tensor would see the first one's numbers."""
    for result in (VERBS[verb](lambda x: x.mul_(2), shape=SHAPE), VERBS[verb](lambda x: x * 2, shape=SHAPE)):
        assert "polynomial of degree 1, homogeneous" in str(result) or verb != "degree"
        assert str(result) == str(VERBS[verb](lambda x: x * 2, shape=SHAPE))


@pytest.mark.parametrize("verb", ["receptive_field", "equivariance", "tensor", "contextual_mapping"])
def test_what_needs_more_memory_than_there_is_is_refused_before_it_is_allocated(verb, monkeypatch):
    monkeypatch.setattr("polymix.limits.memory_of", lambda device="cpu": 2**28)
    with pytest.raises(PolymixError, match=r"memory|at most"):
        VERBS[verb](lambda x: x, shape=(1, 3000, 4))


def test_outputs_of_one_shape():
    with pytest.raises(ShapeError, match="one shape"):
        lens.distance(lambda x: x[:, : 1 + int(x.sum() > 3)], lambda x: x[:, :2], shape=SHAPE, draws=64)


@pytest.mark.parametrize("p", [50.0, 5_000, 1e6])
def test_a_large_p_is_near_the_largest_difference(p):
    """0.3^(10^6) is 0 in float64, and so was the distance."""
    apart = lens.distance(lambda x: x * 0 + 0.3, torch.zeros_like, p=p, shape=SHAPE, draws=8)
    assert apart.value == pytest.approx(0.3 * 6 ** (1 / p))


def test_the_error_names_the_argument_of_the_verb():
    for argument in ("f", "g"):
        with pytest.raises(PolymixError) as info:
            lens.distance(**{"f": torch.sin, "g": torch.sin, "shape": SHAPE, argument: Raises()})
        assert info.value.argument == argument


WEIGHTS = lens.tensor(build("poly_nl", 2), 3, tokens=3)


@pytest.mark.parametrize(("order", "weights", "error"), [
    (1, FACTOR * math.nan, OptionError), (1, FACTOR.long(), ShapeError), (1, FACTOR * 1j, ShapeError), (2, FACTOR, ShapeError),
    (1, FACTOR.to("meta"), ShapeError), (1, FACTOR.to_sparse(), ShapeError), (1, FACTOR[:0], ShapeError), (1, [1.0], ShapeError),
    (-1, FACTOR, OptionError), (2, torch.ones(3, 2, 3, 2, 4, 2), ShapeError),
])  # fmt: skip
def test_weights_of_no_polynomial(order, weights, error):
    with pytest.raises(error):
        WeightTensor(order, weights)


@pytest.mark.parametrize(("source", "options", "error", "argument"), [
    (WEIGHTS, {"form": "cp", "rank": 10**9}, OptionError, "rank"), (WEIGHTS, {"rank": 2}, OptionError, "rank"),
    (WEIGHTS, {"block": 2}, OptionError, "block"), (WEIGHTS, {"keep": 0.5}, OptionError, "keep"),
    (WEIGHTS, {"tokens": 3}, OptionError, "tokens"), (WEIGHTS, {"causal": True}, OptionError, "causal"),
    (WEIGHTS, {"masks": {2: WEIGHTS.mask}}, OptionError, "masks"), (WEIGHTS, {"masks": {3: WEIGHTS.weights}}, ShapeError, "masks"),
    ([WEIGHTS, WeightTensor(1, FACTOR.double()[:2, :, :2])], {}, ShapeError, "source"),
    ([WEIGHTS, WeightTensor(1, FACTOR)], {}, ShapeError, "source"),
    (lambda x: x**9, {"shape": (2,)}, OptionError, "source"),
])  # fmt: skip
def test_a_layer_that_cannot_be_fitted(source, options, error, argument):
    """Among them options that had no effect, and orders above 8, which were left out of the fit without a word."""
    with pytest.raises(error) as info:
        PolynomialLayer.fit(source, **options)
    assert info.value.argument == argument


def test_a_layer_says_for_how_many_tokens_it_is():
    layer = PolynomialLayer.fit(WEIGHTS)
    for x in (torch.ones(1, 4, 2).double(), torch.ones(3, 2).double(), None):
        with pytest.raises(ShapeError, match="N=3, C=2"):
            layer(x)
    with pytest.raises(ShapeError, match="N=3, C=2"):
        WEIGHTS(torch.ones(4, 2).double())


@pytest.mark.parametrize("mixer", [None, "pom", lambda x: x, Raises(), nn.Linear(2, 2, device="meta"), nn.Linear])
def test_as_padre_refuses_what_is_no_module(mixer):
    with pytest.raises(PolymixError):
        lens.as_padre(mixer, 3, dim=2)


def test_as_padre_of_what_is_nowhere_finite():
    class Nowhere(nn.Module):
        def forward(self, x):
            return x * math.nan

    with pytest.raises(PolymixError):
        lens.as_padre(Nowhere(), 3, dim=2)
