"""Every mixer's cost: `cost_formula`, evaluated, equals `cost`, which equals PyTorch's own FLOP counter.

A formula is a term in N, D, d = D / heads, the grid's H and W, and options by name, then parts behind semicolons:
"TERM if CONDITION" replaces it, "plus TERM if CONDITION" and "minus TERM if CONDITION" change it, "plus TERM for each x
in OPTION" adds one for every entry, "where NAME = TERM" defines a name, "where NAME = TERM if CONDITION" before it
defines it otherwise, and "for …" is a remark.
"""

import math
import re

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

import polymix
from polymix.mixers import config_class
from polymix.ops.pom import BLOCK
from polymix.ops.shared.depthwise import effective_kernel
from polymix.ops.shared.fft_conv import fft_size
from tests.contracts.mixer_cases import CASES

FUNCTIONS = {"ceil": math.ceil, "floor": math.floor, "log2": math.log2, "min": min, "binomial": math.comb}
TOKENS = r"\d+\.?\d*|[A-Za-z_]\w*|\*\*|[-+*/(),]"


def python(term):
    """A term as Python: ⌈x⌉, log₂ and x² written out, and a product sign wherever two factors stand side by side."""
    for sign, text in (("⌈", "ceil("), ("⌉", ")"), ("⌊", "floor("), ("⌋", ")"), ("log₂", "log2"), ("²", "**2")):
        term = term.replace(sign, text)
    parts = re.findall(TOKENS, term)
    assert "".join(parts) == term.replace(" ", ""), f"{term!r} has other signs than a formula may have"
    out = []
    for part in parts:
        factor = re.match(r"\w", part) or part == "("
        if out and factor and (re.match(r"\w", out[-1]) or out[-1] == ")") and out[-1] not in FUNCTIONS:
            out.append("*")
        out.append(part)
    return "".join(out)


class Names(dict):
    """What the names in a formula stand for: definitions first, then the options."""

    def __init__(self, mixer, **known):
        super().__init__(FUNCTIONS, **known)
        self.mixer = mixer

    def __missing__(self, name):
        return getattr(self.mixer.config, name)

    def value(self, term):
        first, alternative, other = term.partition(" or ")
        if alternative:
            value = self[first.strip()]
            return self.value(other) if value is None else value
        return eval(python(term), {"__builtins__": {}}, self)

    def holds(self, condition):
        for word, combine in ((" and ", all), (" or ", any)):
            if word in condition:
                return combine(self.holds(part) for part in condition.split(word))
        if condition.startswith("not "):
            return not self.holds(condition[4:])
        match = re.fullmatch(r"(\w+) ([=≠≤>]) (.+)", condition)
        if not match:
            return bool(self[condition])
        name, sign, other = match.groups()
        if sign in "=≠":
            return (str(self[name]) == other) == (sign == "=")
        return self[name] <= self.value(other) if sign == "≤" else self[name] > self.value(other)


def evaluate(formula, names):
    term, *parts = formula.split("; ")
    for part in parts:
        if part.startswith("where "):
            name, _, meaning = part.removeprefix("where ").partition(" = ")
            meaning, _, condition = meaning.partition(" if ")
            if name not in names and (not condition or names.holds(condition)):
                names[name] = names.value(meaning)
    changes = []
    for part in parts:
        if part.startswith(("where ", "for ")):
            continue
        match = re.fullmatch(r"(plus |minus |)(.+) (?:if (.+)|for each (\w+) in (\w+))", part)
        change, text, condition, each, option = match.groups()
        if each:
            for entry in names[option] or ():
                names[each] = entry
                changes.append(names.value(text))
        elif names.holds(condition):
            if change:
                changes.append(names.value(text) * (1 if change == "plus " else -1))
            else:
                term = text
    return names.value(term) + sum(changes)


def names_of(mixer, n, grid):
    """What a formula may refer to besides options: sizes, and what only the weights or the grid settle."""
    heads = getattr(mixer, "heads", getattr(mixer.config, "heads", 1))
    known = {"N": n, "D": mixer.dim, "heads": heads, "d": mixer.dim // heads}
    if grid is not None and len(grid) == 2:
        known |= {"H": grid[0], "W": grid[1]}
    if mixer.name in ("se", "gc", "non_local"):  # timm rounds the width of the bottleneck
        layer = mixer.layer
        conv = {
            "se": lambda: layer.fc1,
            "non_local": lambda: layer.t,
            "gc": lambda: (layer.mlp_scale or layer.mlp_add).fc1,
        }
        known["r"] = 0 if mixer.config.__dict__.get("form") == "effective" else conv[mixer.name]().out_channels
    if mixer.name in ("padre", "conv2former", "focused"):
        axes = len(grid)
        kernel = mixer.config.kernel_size
        kernel = kernel if isinstance(kernel, tuple) else (kernel,) * axes
        known["taps"] = math.prod(effective_kernel(kernel, grid))
    if mixer.name == "hyena":
        known["L"] = fft_size(n + min(n, mixer.config.length) - 1)
    return Names(mixer, **known)


def check(name, n, dim=24, **options):
    mixer = polymix.create_mixer(name, dim, **options)
    grid = mixer.config.built_grid or (n,)
    names = names_of(mixer, n, grid)
    assert evaluate(config_class(name).cost_formula, names) == mixer.cost(n).multiply_adds


GRIDS = {"focused", "tesa", "conv2former", "poly_sa"}
MORE = [  # settings that the cases of all mixers leave out
    ("padre", {"degree": 3, "heads": 2, "grid": (6, 8), "kernel_size": (3, 5)}), ("padre", {"degree": 4, "kernel_size": 7}),
    ("padre", {"degree": 2, "grid": (2, 4, 6), "kernel_size": 3}), ("padre", {"degree": 5, "causal": True, "kernel_size": 2}),
    ("qt", {"heads": 2, "order": 1}), ("qt", {"heads": 2, "order": 0}), ("qt", {"heads": 4, "form": "full", "order": 1}),
    ("qt", {"heads": 3, "scales": (3, 5), "grid": (6, 8)}), ("qt", {"heads": 4, "form": "full", "scales": (5,), "grid": (6, 8)}),
    ("poly_nl", {"order": 2}), ("poly_nl", {"reduction": 3}), ("poly_nl", {"order": "2+3"}),
    ("pom", {"expand": 1.5}), ("pom", {"groups": 4}), ("pom", {"selection_heads": 6}), ("pom", {"decay": 2}),
    ("linear", {"normalize": False}), ("performer", {"heads": 2, "features": 5}), ("castling", {"heads": 2, "sparse_reg": True}),
    ("sima", {"heads": 2, "class_attention": True}), ("focused", {"grid": (6, 8), "sr_ratio": 2, "heads": 2}),
    ("focused", {"grid": (5, 7), "sr_ratio": 2, "kernel_size": 3}), ("relu_linear", {"heads": 3, "scales": (3, 5), "grid": (6, 8)}),
    ("tesa", {"grid": (6, 8), "reduction": 5}), ("tesa", {"grid": (6, 8), "reduction": 5, "form": "dot_product"}),
    ("gc", {"use_attn": False}), ("gc", {"fuse_add": True}), ("gc", {"fuse_scale": False, "fuse_add": True, "residual": True}),
    ("non_local", {"projection": False}), ("non_local", {"form": "dot_product", "projection": False, "rd_channels": 5}),
    ("efficient", {"reduction": 3, "heads": 2}), ("se", {"rd_channels": 5}), ("non_local", {"rd_ratio": 0.5}), ("prodpoly", {"degree": 5, "rank": 7}),
    ("prodpoly", {"degree": 4, "decomposition": "nested"}), ("prodpoly", {"degree": 4, "decomposition": "product"}),
    ("latent_gnn", {"kernels": 3, "latent": 7, "reduction": 5}), ("latent_gnn", {"graph": "learned"}), ("local", {"window": 16}),
    ("hyena", {"filter": "explicit", "length": 64, "order": 3, "bidirectional": True}), ("mamba", {"bidirectional": True}),
    ("conv2former", {"grid": (6, 8), "kernel_size": 5, "num_prefix_tokens": 2}), ("local", {"window": 7}), ("mamba", {"expand": 1.5, "state_size": 5, "conv_kernel": 3}), ("conv2former", {"grid": (6, 8), "kernel_size": 5}),
    ("conv2former", {"grid": (48,), "kernel_size": 5}), ("conv2former", {"grid": (2, 24), "kernel_size": 11}),
    ("hyena", {"order": 3, "length": 100, "filter_width": 7, "filter_depth": 3, "emb_dim": 5}),
    ("hyena", {"filter": "explicit", "length": 64}), ("hyena", {"filter": "explicit", "length": 65, "order": 4}),
    ("poly_sa", {"grid": (6, 8), "head_mixing": "depthwise"}), ("knn", {"aggregate": "mean"}), ("softmax", {"heads": 2}),
    ("power", {"heads": 4, "degree": 4, "gate": True}),
]  # fmt: skip
# Sums of maps, other structures, denominators: the formula is of PADRe's default maps, and says so.
OTHER_MAPS = {"padre-1d", "padre-structures", "padre-tied", "padre-rational", "padre-basis", "padre-toeplitz"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in OTHER_MAPS])
@pytest.mark.parametrize("n", [12, 60])
def test_cases(case, n):
    name, options = CASES[case]
    if "grid" in options and n != 12:
        options = {**options, "grid": (options["grid"][0] * (n // 12), *options["grid"][1:])}
    check(name, n, dim=12, **options)


@pytest.mark.parametrize(("name", "options"), MORE)
@pytest.mark.parametrize("dim", [24, 48])
def test_settings(name, options, dim):
    n = math.prod(options.get("grid", (48,))) + options.get("num_prefix_tokens", 0)
    check(name, n, dim, **options)


@pytest.mark.parametrize("n", [2, 33, 100])
def test_lengths(n):
    for name in set(polymix.list_mixers()) - GRIDS - {"padre"}:
        check(name, n, **({"length": 128} if name == "hyena" else {}))
    check("padre", n)


def test_every_mixer_says_its_cost():
    assert BLOCK == 32, "PoM's formula has it"
    for name in polymix.list_mixers():
        config = config_class(name)
        assert f"Cost: {config.cost_formula}, in multiply-adds." in config.mixer.__doc__
        assert config.mixer.__doc__.count("Cost:") == 1, name


def test_the_evaluation_of_a_formula():
    """What it computes, by hand, and that it sees a wrong sign."""
    mixer = polymix.create_mixer("castling", 8, heads=2, sparse_reg=True)
    names = Names(mixer, N=3, D=8, d=4)
    assert evaluate("4 N D² + 2 N D d; plus 2 N² D if sparse_reg", names) == 4 * 3 * 64 + 2 * 3 * 8 * 4 + 2 * 9 * 8
    assert evaluate("N (D + 1); D if not sparse_reg; minus ⌈N / 2⌉ if kernel_size = 9", names) == 27 - 2
    assert evaluate("K N; where K = heads or 2 d; for big K", names) == 6
    with pytest.raises(AssertionError, match="other signs"):
        evaluate("4 N · D", names)


@pytest.mark.parametrize("case", list(CASES))
def test_formula_equals_the_counter(case):
    name, options = CASES[case]
    mixer = polymix.create_mixer(name, 12, **options, impl="eager")  # cost() is of the equation as it is written
    # The fused CPU kernel is not in the counter's table: its two products are counted on the plain path.
    with FlopCounterMode(display=False) as counter, torch.no_grad(), sdpa_kernel(SDPBackend.MATH):
        mixer(torch.randn(1, 12, 12))
    cost = mixer.cost(12)
    assert cost.counted_flops == counter.get_total_flops()
    assert cost.parameters == sum(p.numel() for p in mixer.parameters())


# Not linear by their definition: all pairs of tokens (softmax, non_local), or of one row's or column's (tesa).
MORE_THAN_LINEAR = {
    "softmax",
    "softmax-relative",
    "softmax-rotary",
    "non_local",
    "tesa",
    "tesa-dot",
    "knn",
    "knn-max",
    "knn-mean",
    "local-wide",  # all pairs up to its window
}
MORE_THAN_LINEAR |= {
    "hyena",
    "hyena-3",
    "hyena-both",
    "hyena-explicit-long",
    "padre-basis",
    "padre-toeplitz",
}  # a Fourier transform: N log N
# A part that does not grow: an MLP on the pooled token (se, gc), messages among the latent nodes, a product of moments.
WITH_A_CONSTANT = {"se", "se-effective", "gc", "gc-add", "latent_gnn", "latent_gnn-learned", "hla"}


@pytest.mark.parametrize("case", [case for case in CASES if case not in MORE_THAN_LINEAR])
def test_growth_is_linear_in_tokens(case):
    name, options = CASES[case]
    options = {**options}
    costs = []
    for n in (48, 96, 192):
        if "grid" in options:
            options["grid"] = (n // 12, *{1: (), 2: (12,), 3: (4, 3)}[len(options["grid"])])
        costs.append(polymix.create_mixer(name, 12, device="meta", **options).cost(n).multiply_adds)
    assert costs[2] - costs[1] == 2 * (costs[1] - costs[0])
    if case not in WITH_A_CONSTANT:
        assert costs[1] == 2 * costs[0]
