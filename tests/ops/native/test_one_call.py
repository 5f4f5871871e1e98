"""Whole mixers in one C function, for calls without gradients, against eager code in float64."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from polymix.ops.native import library
from tests.helpers import build as mixer_of
from tests.helpers import tokens
from tests.mixers.impls.cases import of
from tests.ops.kernels import error_by_token, needs_it

pytestmark = needs_it
CASES = {
    "pom": ("pom", {}), "pom of odd width": ("pom", {"expand": 1.55, "degree": 3, "bias": False}),
    "pom, sums": ("pom", {"reduction": "sum", "degree": 1}),
    "pom, other functions": ("pom", {"activation": "clamped_leaky_relu", "gate": "hardsigmoid"}),
    "qt": ("qt", {"heads": 3}), "qt of odd heads": ("qt", {"heads": 4, "bias": False}), "qt, order 1": ("qt", {"order": 1}),
    "qt, order 0": ("qt", {"order": 0}),
}  # fmt: skip
ONE = {"pom": ["pom_pooled"], "qt": ["qt_whole"]}
PARTS = {"pom": ["linear_powers", "linear_gated"], "qt": ["qt_pool", "qt_spread"]}


@pytest.fixture
def functions(monkeypatch):
    """The names of the C functions that run."""
    names, call = [], library.addresses
    monkeypatch.setattr(library, "addresses", lambda name, args: [names.append(name), call(name, args)][1])
    return names


@pytest.mark.parametrize("case", list(CASES))
@pytest.mark.parametrize(("batch", "n"), [(1, 1), (1, 197), (3, 260)])
def test_a_whole_mixer_equals_eager_code(case, batch, n, with_threads):
    mixer = mixer_of(CASES[case][0], 60, **CASES[case][1]).float()
    x, mask = tokens(batch, n, 60, dtype=torch.float32), tokens(batch, n, seed=9) < 0.5
    mask[-1] = False  # a sample without a real token
    for real in (None, mask):
        with torch.no_grad():
            expected = of(mixer, "eager").double()(x.double(), mask=real)
            for threads in with_threads(1, 2):
                error = error_by_token(of(mixer, "native")(x, mask=real), expected)
                most = 1e-4 if case == "qt, order 1" else 1e-5  # it divides by sums near zero
                assert error < most, f"{threads} threads: C computes something else than the equations"


@pytest.mark.parametrize("name", list(ONE))
def test_one_function_runs_unless_gradients_or_operators_are_asked_for(name, functions):
    """Two calls take more Python than the second one computes on few tokens; one call would lose gradients and counts."""
    mixer, x = mixer_of(name, 60, impl="native").float().eval(), tokens(2, 197, 60, dtype=torch.float32)
    with torch.no_grad():
        mixer(x)
    assert functions == ONE[name]
    functions.clear()
    mixer(x)
    with torch.no_grad():
        mixer(x, x.clone())  # another context, which may have another number of tokens
    with torch.no_grad(), FlopCounterMode(display=False):
        mixer(x)
    with torch.no_grad(), torch.autocast("cpu"):
        mixer(x)
    assert functions == 4 * PARTS[name]
