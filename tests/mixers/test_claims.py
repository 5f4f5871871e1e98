"""What the papers claim of their mixers besides the equation: no transcendental functions, order, growth of the cost."""

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

import polymix
from polymix.workflows.show import published
from tests.helpers import Golden, build, close, tokens

BASED = Golden("based_taylor")
# Functions that PADRe avoids, as they are slow on mobile hardware (PADRe, Sec. 3.6).
TRANSCENDENTAL = (
    "exp",
    "log",
    "sin",
    "cos",
    "tanh",
    "sigmoid",
    "erf",
    "gelu",
    "silu",
    "softmax",
    "rsqrt",
    "sqrt",
    "div",
    "pow",
)


def functions(mixer, *inputs, **options):
    """The names of all operators in a mixer's traced graph, without gradients."""
    with torch.no_grad():
        graph = make_fx(lambda *parts: mixer(*parts, **options))(*inputs).graph
    targets = (node.target for node in graph.nodes if node.op == "call_function")
    return {getattr(target, "overloadpacket", target).__name__ for target in targets}


@pytest.mark.parametrize("options", [
    {}, {"grid": (3, 4), "kernel_size": 3}, {"degree": 3, "preset": "full", "heads": 2}, {"degree": 4, "causal": True},
    {"grid": (3, 4), "kernel_size": 3, "num_prefix_tokens": 1, "degree": 3}, {"basis": "chebyshev", "weight": "channel"},
], ids=str)  # fmt: skip
def test_the_graph_of_padre_has_products_and_sums_alone(options):
    mixer = build("padre", 8, impl="eager", **options)
    found = functions(mixer, tokens(2, 12 + options.get("num_prefix_tokens", 0), 8))
    allowed = {"div"} if options.get("num_prefix_tokens") else set()  # the mean that a class token reads
    bad = {name for name in found for word in TRANSCENDENTAL if word in name.split("_")} - allowed
    assert not bad
    assert {"mul"} <= found
    assert {"addmm", "bmm", "mm", "linear", "baddbmm"} & found


def test_the_search_for_functions_finds_them():
    found = functions(build("softmax", 8, heads=2, impl="eager"), tokens(2, 12, 8))
    assert any("softmax" in name or "exp" in name or "attention" in name for name in found)
    assert "gelu" in functions(build("pom", 8, impl="eager"), tokens(2, 12, 8))
    assert "div" in functions(build("padre", 8, impl="eager", denominator=1, eps=1.0), tokens(2, 12, 8))


@pytest.mark.parametrize("options", [{}, {"form": "full"}, {"form": "full", "order": 1}, {"order": 1}], ids=str)
def test_qt_does_not_depend_on_the_order_of_the_tokens(options):
    """Permuted tokens give permuted outputs, and a permuted context the same ones."""
    mixer, x, context = build("qt", 8, heads=2, **options), tokens(2, 11, 8), tokens(2, 7, 8, seed=1)
    order, other = (torch.randperm(n, generator=torch.Generator().manual_seed(n)) for n in (11, 7))
    close(mixer(x[:, order]), mixer(x)[:, order], 1e-12)
    close(mixer(x, context[:, other]), mixer(x, context), 1e-12)
    mask = torch.arange(11).expand(2, 11) % 3 != 1
    close(mixer(x[:, order], mask=mask[:, order])[mask[:, order]], mixer(x, mask=mask)[:, order][mask[:, order]], 1e-12)
    assert (mixer(x[:, order], causal=True) - mixer(x, causal=True)[:, order]).abs().max() > 1e-3


@pytest.mark.parametrize("options", [{}, {"form": "full"}, {"order": 1}], ids=str)
def test_qt_does_not_depend_on_the_order_of_the_features(options):
    """QT-ViT: elements of K_r that are reordered alike for q and k leave their inner product as it is.

    In the mixer: channels of a head, and with them its features, in another order in W_q and W_k alike. In one of them
    alone they change the output.
    """
    mixer, x = build("qt", 8, heads=2, **options), tokens(2, 11, 8)
    order = torch.tensor([2, 0, 3, 1])
    rows = torch.cat((order, 4 + order))  # of both heads
    before = mixer(x)
    with torch.no_grad():
        maps = mixer.qkv.qkv
        for part in (maps.weight, maps.bias):
            part[:8] = part[rows]
        assert (mixer(x) - before).abs().max() > 1e-6, "queries alone"
        for part in (maps.weight, maps.bias):
            part[8:16] = part[8 + rows]
    close(mixer(x), before, 1e-12)


@pytest.mark.parametrize("case", list(BASED.meta))
def test_full_qt_is_the_taylor_attention_of_based(case):
    """Outputs and gradients of the public code, causal and in float64."""
    weights, sizes = BASED.part(case, "w"), BASED.meta[case]["constructor"]
    options = {"form": "full", "heads": sizes["num_heads"], "bias": False}
    mixer = polymix.create_mixer("qt", sizes["d_model"], dtype=torch.float64, **options)
    names = ("proj_q.weight", "proj_k.weight", "proj_v.weight")
    with torch.no_grad():
        mixer.qkv.qkv.weight.copy_(torch.cat([weights[name] for name in names]))
        mixer.proj.weight.copy_(weights["out_proj.weight"])
    x = BASED.part(case, "in")["x"].clone().requires_grad_()
    y = mixer(x, causal=True)
    close(y, BASED.part(case, "out")["y"], 1e-9)
    (y * BASED.part(case, "cot")["y"]).sum().backward()
    close(x.grad, BASED.part(case, "grad/in")["x"], 1e-8)
    theirs = BASED.part(case, "grad/w")
    close(mixer.qkv.qkv.weight.grad, torch.cat([theirs[name] for name in names]), 1e-8)
    close(mixer.proj.weight.grad, theirs["out_proj.weight"], 1e-8)


@pytest.mark.parametrize("order", [2, 3])
def test_the_cost_of_hyena_grows_as_n_log_n(order):
    """Twice the tokens cost twice as much and 15 D N for each filter, as a transform of 2 N points is N log N; attention N²."""

    def more(mixer, n):
        return mixer.cost(2 * n).multiply_adds - 2 * mixer.cost(n).multiply_adds

    hyena = polymix.create_mixer("hyena", 8, order=order, length=2**16, device="meta")
    attention = polymix.create_mixer("softmax", 8, device="meta")
    for n in (256, 1024, 8192):
        assert more(hyena, n) == 15 * 8 * n * (order - 1)
        assert more(attention, n) == 2 * 8 * (4 - 2) * n**2


@pytest.mark.parametrize(("n", "d"), [(256, 1024), (4096, 64), (512, 512), (196, 192)])
def test_attention_between_channels_is_cheaper_than_between_tokens_where_these_are_more(n, d):
    """Poly-SA, Section 5.2.1: XCA and linear attention, with one head, beat attention for C < N alone."""
    softmax, xca = (
        polymix.create_mixer(name, d, heads=1, device="meta").cost(n).multiply_adds for name in ("softmax", "xca")
    )
    assert (softmax - xca > 0) == (n > d) and (softmax == xca) == (n == d)


@pytest.mark.parametrize(("n", "d", "inner", "k"), [(1000, 512, 1024, 2), (64, 48, 36, 5)])
def test_the_multiplications_of_pom_as_printed(n, d, inner, k):
    """PoM, Section 3.4: 3 n d D for the maps, which `cost` counts, and (k + 1) n D for powers and gate, which it leaves out."""
    mixer = polymix.create_mixer("pom", d, degree=k, expand=inner / d, device="meta")
    assert mixer.cost(n).multiply_adds == 3 * n * d * inner
    figures = {figure.quantity: figure.value for figure in published(mixer, n)}
    assert figures["multiplications"] == f"{(3 * n * d * inner + (k + 1) * n * inner) / 1e9:.3f} G"
