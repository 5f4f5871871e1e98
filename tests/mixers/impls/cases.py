"""The forms of every mixer that has more than eager code, and how one implementation is held against another."""

import copy
import math

import pytest
import torch

from tests.helpers import build

PADRE = {
    "1": {"degree": 1}, "2": {}, "3": {"degree": 3}, "4": {"degree": 4},
    "2 full": {"preset": "full"}, "4 full": {"degree": 4, "preset": "full"},
    "terms 1 3": {"degree": 3, "terms": (1, 3)}, "term 3": {"degree": 3, "terms": (3,), "weight": "channel"},
    "weights": {"degree": 3, "weight": "channel", "constant": "channel"}, "no bias": {"degree": 3, "bias": False},
    "causal": {"degree": 3, "causal": True}, "dilated": {"token": "depthwise:kernel=3:dilation=2", "degree": 3},
    "causal, dilated": {"token": "depthwise:kernel=4:dilation=3", "causal": True},
    "no C": {"degree": 3, "C": "identity"}, "no D": {"degree": 3, "D": "identity"},
    "no A, C, D": {"degree": 3, "A": ("depthwise", "identity", "identity"), "C": "identity", "D": "identity"},
}  # fmt: skip
GRIDS = {
    "2-D": {"grid": (5, 7), "degree": 3}, "2-D full": {"grid": (5, 7), "weight": "full", "constant": "full"},
    "3-D": {"grid": (2, 3, 5), "preset": "full"}, "2-D dilated": {"grid": (5, 7), "token": "depthwise:kernel=3:dilation=2"},
    "long": {"grid": (35, 1), "kernel_size": (5, 1)},
    "prefix": {"grid": (5, 7), "num_prefix_tokens": 2, "degree": 3, "terms": (1, 3), "weight": "channel"},
    "1-D prefix": {"grid": (35,), "num_prefix_tokens": 1, "bias": False},
}  # fmt: skip
POM = {
    "1": {"degree": 1}, "2": {}, "3": {"degree": 3, "reduction": "sum"}, "4": {"degree": 4}, "no bias": {"bias": False},
    "relu": {"activation": "relu", "gate": "hardsigmoid"}, "identity": {"activation": "identity", "gate": "identity"},
    "clamped": {"activation": "clamped_leaky_relu", "selection_heads": 4, "expand": 1}, "one gate": {"selection_heads": 1},
}  # fmt: skip
QT = {
    f"{form} {order}": {"form": form, "order": order, "heads": 2} for form in ("full", "compact") for order in range(3)
}
SA = {
    "mean": {"positions": "mean", "heads": 2}, "sigmoid": {"positions": "mean", "heads": 3, "sigma": "sigmoid"},
    "tanh": {"positions": "mean", "sigma": "tanh", "bias": False}, "identity": {"positions": "mean", "sigma": "identity"},
    "learned": {"grid": (35,), "heads": 2}, "learned 2-D": {"grid": (5, 7), "heads": 2, "sigma": "tanh"},
    "prefix": {"grid": (5, 7), "heads": 2, "num_prefix_tokens": 2},
    "depthwise": {"grid": (5, 7), "heads": 2, "head_mixing": "depthwise"},
    "depthwise mean": {"grid": (5, 7), "positions": "mean", "head_mixing": "depthwise"},
}  # fmt: skip
NL = {"1": {}, "2": {"reduction": 2}, "4": {"reduction": 4, "bias": False},
      "outside": {"reduction": 2, "alpha_inside": False}}  # fmt: skip
OPTIONS = {"padre": PADRE | GRIDS, "pom": POM, "qt": QT, "poly_sa": SA, "poly_nl": NL}
CASES = {f"{name}: {case}": (name, options) for name, cases in OPTIONS.items() for case, options in cases.items()}
MAIN = ["padre: 3", "pom: 2", "qt: compact 2", "poly_sa: mean", "poly_nl: 2"]
every_case = pytest.mark.parametrize("case", list(CASES))
main = pytest.mark.parametrize("case", MAIN)


def make(case, dim=12):
    name, options = CASES[case]
    if name == "padre" and "token" not in options:
        options = {"kernel_size": 3, **options}
    return build(name, dim, **options)


def of(mixer, impl):
    """The same weights, run by another implementation."""
    other = copy.deepcopy(mixer)
    other.config = mixer.config.changed(impl=impl)
    return other


def length(case):
    options = CASES[case][1]
    return math.prod(options.get("grid", (35,))) + options.get("num_prefix_tokens", 0)


def padding(batch, n):
    """Some padding in every row, and a row of padding alone."""
    mask = torch.rand(batch, n, generator=torch.Generator().manual_seed(3)) < 0.6
    mask[-1] = False
    return mask


@torch.no_grad()
def both(mixer, impl, *args, **kw):
    return of(mixer, impl)(*args, **kw), of(mixer, "eager")(*args, **kw)
