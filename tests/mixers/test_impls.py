"""Every implementation against eager code, what each refuses by name, and what "auto" makes of each way of calling."""

import copy
import math

import pytest
import torch

import polymix
from polymix.errors import CapabilityError, OptionError
from polymix.ops.blocked import common
from polymix.ops.blocked import padre as blocked_padre
from polymix.ops.dispatch import IMPLS
from tests.helpers import build, close, tokens

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
NL = {"1": {}, "2": {"reduction": 2}, "4": {"reduction": 4, "bias": False}}
OPTIONS = {"padre": PADRE | GRIDS, "pom": POM, "qt": QT, "poly_sa": SA, "poly_nl": NL}
CASES = {f"{name}: {case}": (name, options) for name, cases in OPTIONS.items() for case, options in cases.items()}
MASKED = [case for case in CASES if case.split(":")[0] in ("pom", "qt", "poly_nl") or "mean" in case]
FREE = [case for case in CASES if "grid" not in CASES[case][1]]
every_case = pytest.mark.parametrize("case", list(CASES))


@pytest.fixture
def small_blocks(monkeypatch):
    """Many blocks in few tokens; fresh memory is NaN, so that what nobody writes shows."""
    monkeypatch.setattr(common, "ROWS", 16)
    monkeypatch.setattr(blocked_padre, "LARGE", 32)
    monkeypatch.setattr(blocked_padre, "CHANNELS", (4,))
    for owner, name in ((torch, "empty"), (torch, "empty_like"), (torch.Tensor, "new_empty")):
        monkeypatch.setattr(owner, name, poisoned(getattr(owner, name)))


def poisoned(allocate):
    def allocated(*args, **kw):
        out = allocate(*args, **kw)
        return out.fill_(math.nan) if out.is_floating_point() else out

    return allocated


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


@pytest.mark.usefixtures("small_blocks")
class TestBlocked:
    @every_case
    @pytest.mark.parametrize("batch", [1, 5])
    def test_equals_eager(self, case, batch):
        close(*both(make(case), "blocked", tokens(batch, length(case), 12)), 1e-12)

    @pytest.mark.parametrize("case", FREE)
    @pytest.mark.parametrize("n", [1, 5, 63, 100, 257])
    def test_awkward_lengths(self, case, n):
        """5: several samples a block, and a last block of fewer."""
        close(*both(make(case), "blocked", tokens(5, n, 12)), 1e-12)

    @pytest.mark.parametrize("case", MASKED)
    @pytest.mark.parametrize("batch", [2, 5])
    def test_padding_that_holds_nan(self, case, batch):
        n = length(case)
        mask = padding(batch, n)
        x = tokens(batch, n, 12)
        hidden = x.masked_fill(~mask[..., None], math.nan)
        ours, wanted = both(make(case), "blocked", x, mask=mask)
        close(ours, wanted, 1e-12)
        with torch.no_grad():
            poisoned = of(make(case), "blocked")(hidden, mask=mask)
        close(poisoned[mask], wanted[mask], 1e-12)

    @pytest.mark.parametrize("case", [case for case in CASES if case.startswith(("pom", "qt"))])
    @pytest.mark.parametrize("masked", [False, True])
    def test_a_separate_context(self, case, masked):
        x, context = tokens(3, 7, 12), tokens(3, 40, 12, seed=1)
        mask = padding(3, 40) if masked else None
        close(*both(make(case), "blocked", x, context, mask=mask), 1e-12)

    @pytest.mark.parametrize("case", [case for case in CASES if case.startswith("pom")])
    @pytest.mark.parametrize("n", [1, 5, 63, 100, 257])
    def test_causal(self, case, n):
        """Running sums across the blocks, with and without padding."""
        mixer, x, mask = make(case), tokens(3, n, 12), padding(3, n)
        close(*both(mixer, "blocked", x, causal=True), 1e-12)
        ours, wanted = both(mixer, "blocked", x, causal=True, mask=mask)
        close(ours, wanted, 1e-12)
        with torch.no_grad():
            unseen = of(mixer, "blocked")(x.masked_fill(~mask[..., None], math.nan), causal=True, mask=mask)
        assert torch.allclose(unseen[mask], wanted[mask], rtol=1e-10, atol=1e-12)

    @every_case
    def test_layouts(self, case):
        """Transposed, sliced and expanded inputs."""
        n, mixer = length(case), make(case)
        x = tokens(3, n, 12)
        wide = torch.zeros(3, 2 * n, 24, dtype=x.dtype)
        wide[:, ::2, 5:17] = x
        layouts = (x.transpose(1, 2).contiguous().transpose(1, 2), x.transpose(0, 1).contiguous().transpose(0, 1),
                   wide[:, ::2, 5:17], x[:1].expand(3, -1, -1))  # fmt: skip
        for layout in layouts:
            before = layout.clone()
            close(*both(mixer, "blocked", layout), 1e-12)
            assert torch.equal(layout, before), "the input was written to"

    @every_case
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
    def test_low_precision(self, case, dtype):
        mixer = make(case).to(dtype)
        x = tokens(2, length(case), 12).to(dtype)
        ours, eager = both(mixer, "blocked", x)
        (exact, _) = both(mixer.double(), "eager", x.double())
        assert ours.dtype == dtype
        error, allowed = ((y.double() - exact).abs().max() / exact.abs().max() for y in (ours, eager))
        if dtype == torch.float32:
            assert error <= 1e-4
        else:
            assert error <= 2 * allowed, f"{error:.1e} > 2 · {allowed:.1e}, what eager code errs in this type"

    @every_case
    def test_same_bits_twice(self, case):
        mixer, x = of(make(case).float(), "blocked"), tokens(2, length(case), 12, dtype=torch.float32)
        with torch.no_grad():
            assert torch.equal(mixer(x), mixer(x))

    @pytest.mark.parametrize("masked", [False, True])
    def test_poly_nl_under_large_means(self, masked):
        """Pooled second moments survive a mean 100 times the spread; about zero it would swallow them."""
        mixer = build("poly_nl", 12, bias=False)
        with torch.no_grad():
            mixer.product.weight -= mixer.product.weight.mean(1, keepdim=True)  # rows that do not see the mean
        x = 100 + tokens(2, 64, 12)
        mask = padding(2, 64) if masked else None
        (exact, _) = both(mixer, "eager", x.float().double(), mask=mask)
        (ours, _) = both(mixer.float(), "blocked", x.float(), mask=mask)
        mixed = exact - mixer.alpha.item() * x
        error = (ours.double() - exact).abs().max() / mixed.abs().max()
        assert error < 1e-4, f"{error:.1e}"


# Interpreted kernels are slow: one shape each.
CALLS = {
    "plain": {}, "causal": {"causal": True}, "blocks of 3": {"causal": 3}, "padding": {"mask": padding(3, 11)},
    "padding, causal": {"mask": padding(3, 11), "causal": True}, "segments": {"segments": torch.tensor([[0] * 4 + [2] * 7, [1, 0] * 5 + [1], [5] * 11])},
    "padding, segments": {"mask": padding(3, 11), "segments": torch.tensor([[0] * 4 + [2] * 7, [1, 0] * 5 + [1], [5] * 11]), "causal": True},
    "cross": {"context": 1}, "cross, padding": {"context": 1, "mask": padding(3, 11)},
}  # fmt: skip
TRITON = [("pom: 3", call) for call in CALLS] + [("pom rotary", call) for call in CALLS]
TRITON += [
    (case, call)
    for case in ("qt: compact 2", "qt: full 2")
    for call in ("plain", "causal", "padding", "padding, causal", "cross, padding")
]
TRITON += [
    (case, call)
    for case in ("poly_nl: 2", "poly_nl order 2", "poly_nl order 2+3", "poly_sa: mean")
    for call in ("plain", "padding")
]
TRITON += [(case, "plain") for case in CASES if case.startswith("padre") and CASES[case][1].get("degree", 2) < 4]
TRITON += [
    (case, "plain")
    for case in (
        "pom: relu",
        "pom: clamped",
        "pom: identity",
        "qt: full 0",
        "qt: compact 1",
        "poly_sa: learned 2-D",
        "poly_sa: prefix",
        "poly_sa: depthwise",
    )
]
EXTRA = {
    "pom rotary": ("pom", {"rotary": "1d", "selection_heads": 4}), "poly_nl order 2": ("poly_nl", {"order": 2}),
    "poly_nl order 2+3": ("poly_nl", {"order": "2+3", "reduction": 3}),
}  # fmt: skip
SMALL = {(5, 7): (2, 5), (2, 3, 5): (2, 3, 2), (35,): (11,), (35, 1): (11, 1)}


@pytest.mark.parametrize(("case", "call"), TRITON)
def test_triton_equals_eager_with_its_gradients(case, call):
    pytest.importorskip("triton")
    name, options = EXTRA.get(case) or CASES[case]
    options = {**options, **({"grid": SMALL[options["grid"]]} if "grid" in options else {})}
    if name == "padre" and "token" not in options:
        options = {"kernel_size": 3, **options}
    n = math.prod(options.get("grid", (11,))) + options.get("num_prefix_tokens", 0)
    mixer, kw = build(name, 12, **options), dict(CALLS[call])
    context = tokens(3, 11, 12, seed=5) if kw.pop("context", None) else None
    x = tokens(3, 7 if context is not None else n, 12)
    found = []
    for impl, dtype in (("triton", torch.float32), ("eager", torch.float64)):
        other = of(mixer, impl).to(dtype)
        inputs = [u.to(dtype).detach().requires_grad_() for u in (x, context) if u is not None]
        y = other(*inputs, **kw)
        leaves = {"x": inputs[0], "context": inputs[-1], **dict(other.named_parameters())}
        found.append(
            {"output": y, **dict(zip(leaves, torch.autograd.grad(y.square().sum(), leaves.values()), strict=True))}
        )
    for part, wanted in found[1].items():
        ours = found[0][part].double()
        assert torch.allclose(ours, wanted, rtol=1e-4, atol=1e-4 * max(wanted.abs().max().item(), 1e-3)), part


def test_triton_same_bits_twice():
    pytest.importorskip("triton")
    for case in ("padre: 3", "pom: 3", "qt: compact 2", "poly_sa: mean", "poly_nl: 2"):
        mixer, x = of(make(case).float(), "triton"), tokens(2, 9, 12, dtype=torch.float32)
        runs = [torch.autograd.grad(mixer(x).square().sum(), list(mixer.parameters())) for _ in range(2)]
        assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True)), case


MAIN = ["padre: 3", "pom: 2", "qt: compact 2", "poly_sa: mean", "poly_nl: 2"]
main = pytest.mark.parametrize("case", MAIN)


def refuses(mixer, impl, match, x, **kw):
    with pytest.raises(CapabilityError, match=match) as caught:
        mixer(x, **kw)
    assert caught.value.argument == "impl" and impl in str(caught.value), "the message must name what was asked for"


@main
def test_blocked_asked_for_by_name_refuses_what_it_cannot(case):
    mixer, x = of(make(case), "blocked"), tokens(2, 35, 12)
    refuses(mixer, "blocked", "no backward", x)
    mixer.requires_grad_(False)
    refuses(mixer, "blocked", "no backward", x.clone().requires_grad_())
    mixer(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refuses(mixer, "blocked", "autocast", x)
    with torch.no_grad(), pytest.raises(CapabilityError, match=r"torch\.func"):
        torch.func.jvp(mixer, (x,), (x,))
    with pytest.raises(CapabilityError, match=r"torch\.func"):
        torch.func.vmap(mixer)(x[None])


@main
def test_blocked_asked_for_by_name_refuses_to_be_compiled(case):
    mixer, x = of(make(case), "blocked").requires_grad_(False), tokens(2, 35, 12)
    with pytest.raises(Exception, match=r"impl.*blocked"):
        torch.compile(mixer, fullgraph=True, backend="eager")(x)
    with pytest.raises(Exception, match=r"impl.*blocked"):
        torch.export.export(mixer, (x,))


@torch.no_grad()
def test_blocked_asked_for_by_name_refuses_masks_order_and_options():
    x, mask = tokens(2, 11, 12), padding(2, 11)
    pom, qt, padre = (of(make(case), "blocked") for case in ("pom: 2", "qt: compact 2", "padre: 3"))
    refuses(padre, "blocked", "takes no mask", x, mask=mask)
    for kw in ({"causal": 3}, {"mask": mask[:, None].expand(2, 11, 11)}, {"segments": mask.long()}):
        refuses(pom, "blocked", "it is for", x, **kw)
    refuses(qt, "blocked", "sees whole", x, causal=True)
    for mixer in (pom, qt, of(make("padre: causal"), "blocked")):
        with pytest.raises(CapabilityError, match="impl"):
            mixer.prefill(x)
    for name, options in (
        ("pom", {"groups": 2}), ("pom", {"rotary": "1d"}), ("poly_nl", {"order": 2}), ("poly_nl", {"order": "2+3"}),
        ("padre", {"heads": 2}), ("padre", {"normalize": "rms"}), ("padre", {"denominator": 1}),
        ("padre", {"basis": "legendre"}), ("padre", {"channel": "monarch:blocks=2"}), ("padre", {"token": "mean"}),
        ("padre", {"grid": (11,), "num_prefix_tokens": 1, "kernel_size": 3}),
    ):  # fmt: skip
        mixer = build(name, 12, impl="blocked", **options)
        refuses(mixer, "blocked", "it is for", tokens(2, 12, 12))


@main
def test_triton_asked_for_by_name_refuses_what_it_cannot(case, monkeypatch):
    pytest.importorskip("triton")
    mixer, x = of(make(case), "triton"), tokens(2, 11, 12)
    refuses(mixer, "triton", "float32", x)
    mixer, x = mixer.float(), x.float()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        refuses(mixer, "triton", "autocast", x)
    with pytest.raises(CapabilityError, match=r"torch\.func"):
        torch.func.jvp(mixer, (x,), (x,))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    if not x.is_cuda:
        refuses(mixer, "triton", "needs a GPU", x)
    monkeypatch.setattr("polymix.ops.dispatch._HAS_TRITON", False)
    refuses(mixer, "triton", "not installed", x)


def test_an_arbitrary_mask_is_not_for_triton():
    x = tokens(2, 5, 12, dtype=torch.float32)
    refuses(of(make("pom: 2").float(), "triton"), "triton", "arbitrary", x, mask=torch.ones(2, 5, 5, dtype=torch.bool))


@pytest.mark.parametrize("name", polymix.list_mixers())
def test_names_of_implementations(name):
    mixer = polymix.create_mixer(name, 12, **({"grid": (3, 4)} if name in NEED_GRID else {}))
    assert set(mixer.impls) == (set(IMPLS) if name in OPTIONS else {"auto", "eager"})
    for impl in {*IMPLS, "cuda", None, ""} - set(mixer.impls):
        with pytest.raises(OptionError, match="impl"):
            mixer.config.changed(impl=impl)
    assert mixer.config.impl == "auto"


NEED_GRID = {"poly_sa", "tesa", "conv2former", "focused"}


@main
def test_auto_is_right_whichever_way_it_is_called(case):
    mixer, x = make(case), tokens(2, 9, 12)
    plain = of(mixer, "eager")
    with torch.no_grad():
        wanted = plain(x)
    for context in (torch.no_grad(), torch.inference_mode(), torch.enable_grad()):
        with context:
            close(mixer(x), wanted, 1e-12)
    u = tokens(2, 9, 12, seed=7)
    for context in (torch.no_grad(), torch.enable_grad()):
        with context:
            y, slope = torch.func.jvp(mixer, (x,), (u,))
            close(y, wanted, 1e-12)
            close(torch.func.vmap(mixer, in_dims=1)(torch.stack((x, u), 1))[0], wanted, 1e-12)
    small = tokens(1, 3, 12)
    jacobian = torch.func.jacrev(mixer)(x[:1])
    close(torch.einsum("bndBND,BND->bnd", jacobian, u[:1]), slope[:1], 1e-11)
    close(torch.func.jacfwd(mixer)(small), torch.func.jacrev(plain)(small), 1e-11)
    with torch.no_grad(), torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, u)
        close(torch.autograd.forward_ad.unpack_dual(mixer(dual)).tangent, slope, 1e-12)
    weights = {name: p.detach() for name, p in mixer.named_parameters()}
    stacked = {name: torch.stack((p, 2 * p)) for name, p in weights.items()}
    many = torch.func.vmap(lambda w: torch.func.functional_call(mixer, w, (x,)))(stacked)
    close(many[0], wanted, 1e-12)


@main
def test_auto_under_autocast_is_eager_under_autocast(case):
    mixer, x = make(case).float(), tokens(2, 9, 12, dtype=torch.float32)
    with torch.inference_mode(), torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(mixer(x), of(mixer, "eager")(x))


@main
def test_auto_compiled_and_exported_without_gradients(case):
    mixer, x = make(case).float().eval(), tokens(2, 9, 12, dtype=torch.float32)
    wanted = of(mixer, "eager")(x)
    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(mixer, fullgraph=True, backend="aot_eager")(x), wanted, 1e-5)
        close(torch.export.export(mixer, (x,)).module()(x), wanted, 1e-5)
