"""Mixers that run the kernels in C against their own eager code: outputs, gradients, what they refuse."""

import math

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.ops.native import library
from polymix.ops.native.library import why_not
from polymix.ops.shared import blocks
from tests.helpers import build, close, tokens
from tests.mixers.impls.cases import CASES, both, length, make, of, padding
from tests.mixers.impls.test_choice import refuses

NATIVE = why_not()
pytestmark = pytest.mark.skipif(NATIVE is not None, reason=f"untested: mixers on the kernels in C: {NATIVE}")
NOT = {"padre: dilated", "padre: causal, dilated", "padre: 3-D", "padre: 2-D dilated", "pom: clamped", "pom: one gate"}
NOT |= {case for case in CASES if case.startswith("qt: full")}
every_case = pytest.mark.parametrize("case", [case for case in CASES if case not in NOT])
ZERO = {("qt: compact 0", "scale")}  # gradients of what cancels: rounding alone is left of them
PADDED = ("pom: 2", "pom: 3", "qt: compact 2", "poly_sa: mean", "poly_nl: 1", "poly_nl: 2", "padre: 3", "padre: causal",
          "padre: 2-D", "padre: prefix", "padre: 1-D prefix")  # fmt: skip


@every_case
@pytest.mark.parametrize("batch", [1, 3])
def test_it_equals_eager_code_with_its_gradients(case, batch):
    mixer, x = make(case), tokens(batch, length(case), 12)
    results = []
    for impl, dtype in (("native", torch.float32), ("eager", torch.float64)):
        other, leaf = of(mixer, impl).to(dtype), x.to(dtype).requires_grad_()
        y = other(leaf)
        leaves = {"x": leaf, **dict(other.named_parameters())}
        grads = torch.autograd.grad(y.square().sum(), leaves.values(), allow_unused=True)
        results.append({"output": y, **dict(zip(leaves, grads, strict=True))})
    for part, expected in results[1].items():
        if (case, part) in ZERO:
            continue
        if expected is None:
            assert results[0][part] is None, part
            continue
        ours = results[0][part].double()
        assert torch.allclose(ours, expected, rtol=1e-4, atol=1e-4 * max(expected.abs().max().item(), 1e-3)), part


@pytest.mark.parametrize("batch", [1, 3])
def test_of_what_cancels_rounding_alone_is_left(batch):
    """A QT of order 0 divides by what it multiplies with: the two halves of that gradient are of the loss's size."""
    ((case, part),) = ZERO
    mixer = of(make(case), "native").float()
    loss = mixer(tokens(batch, length(case), 12, dtype=torch.float32)).square().sum()
    loss.backward()
    assert getattr(mixer, part).grad.abs().max() < 1e-5 * loss


@every_case
def test_without_gradients_it_is_the_same(case):
    mixer, x = make(case).float(), tokens(2, length(case), 12, dtype=torch.float32)
    before = x.clone()
    ours, expected = both(mixer, "native", x)
    close(ours, expected, 1e-5)
    assert torch.equal(x, before), "the input was written to"
    with torch.no_grad():
        close(of(mixer, "native").fold()(x), expected, 1e-5)
        close(of(mixer, "auto")(x), ours, 1e-7)


@pytest.mark.parametrize("case", PADDED)
def test_padding_with_its_gradients(case):
    """A row of padding alone, too; what padding holds reaches nothing."""
    n, found = length(case), []
    x, mask = tokens(3, n, 12), padding(3, n)
    for impl, dtype in (("native", torch.float32), ("eager", torch.float64)):
        mixer = of(make(case), impl).to(dtype)
        leaf = x.to(dtype).masked_fill(~mask.unsqueeze(-1), 1e3).requires_grad_()
        y = mixer(leaf, mask=mask)[mask]
        found.append([y, *torch.autograd.grad(y.square().sum(), (leaf, *mixer.parameters()))])
        assert not found[-1][1][~mask].any(), "the gradient of padding"
    for ours, expected in zip(*found, strict=True):
        assert torch.allclose(ours.double(), expected, rtol=1e-4, atol=1e-4 * max(expected.abs().max().item(), 1e-3))


def shapes(n):
    """Masks of four rows each: tokens missing behind, in front, anywhere; and each with a row of padding alone."""
    place, size = torch.arange(n), torch.tensor([[n], [n - 1], [n // 2 + 1], [0]])
    behind = place < size
    return {"behind": behind, "in front": behind.flip(1), "anywhere": padding(4, n), "none": torch.ones(4, n) > 0,
            "only padding": torch.zeros(4, n) > 0, "expanded": behind[2:3].expand(4, n), "strided": behind.t().contiguous().t()}  # fmt: skip


@pytest.mark.parametrize(
    "case", [case for case in CASES if not (case.startswith("poly_sa") and "positions" not in CASES[case][1])]
)
def test_a_padding_mask_changes_no_implementation(case):
    """Whatever runs without a mask runs with one, in training and without gradients."""
    mixer, n = make(case).float(), length(case)
    for records in (True, False):
        with torch.set_grad_enabled(records):
            x = tokens(2, n, 12, dtype=torch.float32)
            without, masked = polymix.explain(mixer, x), polymix.explain(mixer, x, mask=padding(2, n))
        assert [part.impl for part in masked] == [part.impl for part in without], masked


@pytest.mark.parametrize("case", PADDED)
def test_every_shape_of_a_padding_mask(case):
    n = length(case)
    mixer, exact, x = of(make(case), "native").float(), of(make(case), "eager"), tokens(4, n, 12)
    for name, mask in shapes(n).items():
        results = []
        for other, dtype in ((mixer, torch.float32), (exact, torch.float64)):
            leaf = x.to(dtype, copy=True).requires_grad_()
            y = other(leaf, mask=mask)[mask]
            results.append([y, *torch.autograd.grad(y.square().sum(), (leaf, *other.parameters()), allow_unused=True)])
        for ours, expected in zip(*results, strict=True):
            assert torch.isfinite(ours).all(), name
            scale = max([expected.abs().max().item()] if expected.numel() else [0], default=0)
            assert torch.allclose(ours.double(), expected, rtol=1e-4, atol=1e-4 * max(scale, 1e-3)), name
        if case.startswith("padre: causal") or not mask.any():
            continue
        with torch.no_grad():
            close(of(mixer, "blocked")(x.float(), mask=mask)[mask].double(), results[1][0], 1e-5)


def test_a_mask_with_equal_rows_is_a_padding_mask():
    """(B, N, M) by value or expanded: the kernels run it. By name it is refused, whatever it holds."""
    mixer, x, mask = make("pom: 2").float(), tokens(3, 300, 12, dtype=torch.float32), padding(3, 300)
    expected = of(mixer, "eager").double()(x.double(), mask=mask[:, None].repeat(1, 300, 1))
    for rows in (mask[:, None].expand(3, 300, 300), mask[:, None].repeat(1, 300, 1)):
        assert polymix.explain(mixer, x, mask=rows)[0].impl == "native"
        close(mixer(x, mask=rows).double(), expected, 1e-5)
        refuses(of(mixer, "native"), "native", "supports", x, mask=rows)
    one_differs = mask[:, None].repeat(1, 300, 1)
    one_differs[1, 7, 5] ^= True
    assert polymix.explain(mixer, x, mask=one_differs)[0].impl == "eager"
    expected = of(mixer, "eager").double()(x.double(), mask=one_differs)
    close(mixer(x, mask=one_differs).double(), expected, 1e-5)


@pytest.mark.parametrize("case", ["pom: 2", "qt: compact 2"])
def test_a_separate_context(case):
    x, context, mask = tokens(3, 9, 12), tokens(3, 35, 12, seed=1), padding(3, 35)
    mixer = make(case)
    ours = of(mixer, "native").float()(x.float(), context.float(), mask=mask)
    close(ours.double(), of(mixer, "eager")(x, context, mask=mask), 1e-5)


@pytest.mark.parametrize("kept", [0, 2000, 4000])
@pytest.mark.parametrize("options", [
    {"grid": (37, 9), "degree": 3}, {"grid": (5, 40), "kernel_size": (3, 7)}, {"grid": (64, 3), "kernel_size": (13, 5)},
    {"grid": (2, 2)}, {"grid": (9, 9), "preset": "full", "degree": 3, "kernel_size": 5},
    {"grid": (11, 7), "degree": 3, "num_prefix_tokens": 2},
])  # fmt: skip
def test_what_no_allocator_keeps_goes_in_bands(options, kept, monkeypatch):
    """Bands of the grid, whose edges see their neighbours; the smallest are one row."""
    mixer = build("padre", 12, **options).float()
    x = tokens(2, math.prod(options["grid"]) + options.get("num_prefix_tokens", 0), 12, dtype=torch.float32)
    (whole, expected) = both(mixer, "native", x)
    monkeypatch.setattr(blocks, "MAX_KEPT_BYTES", kept)
    (banded, _) = both(mixer, "native", x)
    close(banded, expected, 1e-5)
    close(banded, whole, 1e-6)


@pytest.mark.usefixtures("bf16_products")
@every_case
def test_bf16(case):
    mixer, x = make(case).bfloat16(), tokens(2, length(case), 12).bfloat16()
    ours, eager = both(mixer, "native", x)
    (exact, _) = both(mixer.double(), "eager", x.double())
    error, allowed = ((y.double() - exact).abs().max() / exact.abs().max() for y in (ours, eager))
    assert ours.dtype == torch.bfloat16 and error <= 2 * allowed, f"{error:.1e} > 2 · {allowed:.1e}"
    mixer, x = of(make(case), "native").bfloat16(), x.requires_grad_()
    mixer(x).float().square().sum().backward()
    assert all(p.grad is None or p.grad.dtype == torch.bfloat16 for p in (x, *mixer.parameters()))


def test_second_derivatives():
    mixer, x = make("padre: 3"), tokens(1, 7, 12)
    slopes = []
    for impl, dtype in (("native", torch.float32), ("eager", torch.float64)):
        other, leaf = of(mixer, impl).to(dtype), x.to(dtype).requires_grad_()
        (slope,) = torch.autograd.grad(other(leaf).square().sum(), leaf, create_graph=True)
        slopes.append(torch.autograd.grad(slope.square().sum(), list(other.parameters()))[0].double())
    close(slopes[0], slopes[1], 1e-4)


def test_what_it_refuses():
    x = tokens(2, 11, 12, dtype=torch.float32)
    mixer = of(make("padre: 3").float(), "native")
    refuses(of(make("padre: 3"), "native"), "native", "float32", x.double())
    with torch.autocast("cpu", dtype=torch.float16):
        refuses(mixer, "native", "autocast to float16", x)
    refuses(of(make("padre: dilated").float(), "native"), "native", "dilation", x)
    refuses(of(make("padre: 3-D").float(), "native"), "native", "one or two axes", x[:, :1].expand(2, 30, 12))
    refuses(build("padre", 12, heads=2, impl="native").float(), "native", "one head", x)
    with pytest.raises(polymix.errors.CapabilityError, match=r"torch\.func"):
        torch.func.vmap(mixer)(x[None])
    with pytest.raises(polymix.errors.CapabilityError, match="state"):
        of(make("padre: causal").float(), "native").prefill(x)


@pytest.mark.parametrize("case", ["padre: 3", "pom: 2", "qt: compact 2", "poly_sa: mean", "poly_nl: 1"])
def test_auto_takes_it_with_and_without_gradients_and_never_for_float64(case, real_thresholds):
    mixer, x = make(case), tokens(2, 300, 12)
    assert polymix.explain(mixer, x)[0].impl == "eager" and "float32 and bfloat16" in polymix.explain(mixer, x)[0].why
    mixer, x = mixer.float(), x.float()
    for context in (torch.enable_grad(), torch.no_grad(), torch.inference_mode()):
        with context:
            assert polymix.explain(mixer, x)[0].impl == "native"
            few = polymix.explain(mixer, x[:, :9])[0]
            assert few.impl == ("native" if mixer.name in ("padre", "qt") else "eager"), few.why


@pytest.mark.parametrize("case", ["padre: 3", "pom: 2", "qt: compact 2", "poly_sa: mean", "poly_nl: 1"])
def test_auto_leaves_bf16_to_a_processor_that_multiplies_it(case, bf16_products, monkeypatch):
    """Kernels that multiply in float32 are slower there, but run when asked for by name; padre has no such products."""
    monkeypatch.setattr(library, "multiplies_bf16", lambda: False)
    mixer, x = make(case).bfloat16(), tokens(2, 300, 12).bfloat16()
    left = bf16_products and not case.startswith("padre")
    with torch.no_grad():
        auto, named = polymix.explain(mixer, x)[0], polymix.explain(of(mixer, "native"), x)[0]
    assert auto.impl == ("blocked" if left else "native") and ("lack the bfloat16 products" in auto.why) == left
    assert named.impl == "native"


@pytest.mark.parametrize("case", ["padre: 3", "pom: 2", "qt: compact 2", "poly_sa: mean", "poly_nl: 1"])
def test_auto_takes_kernels_that_multiply_bf16(case, processor, monkeypatch):
    processor(amx=False, avx512=True)
    monkeypatch.setattr(library, "multiplies_bf16", lambda: True)
    mixer, x = make(case).bfloat16(), tokens(2, 300, 12).bfloat16()
    for context in (torch.enable_grad(), torch.no_grad()):
        with context:
            assert polymix.explain(mixer, x)[0].impl == "native"


@pytest.mark.parametrize("autocast", [False, True])
@pytest.mark.parametrize("amx", [False, True])
@pytest.mark.parametrize("case", ["pom: 2", "qt: compact 2", "poly_sa: mean", "poly_nl: 1"])
def test_auto_trains_in_bf16_where_that_is_faster(case, amx, autocast, processor, monkeypatch, real_thresholds):
    """With AVX512_BF16, Poly-SA and Poly-NL train in C from 16,384 tokens in a batch on; without gradients always."""
    processor(amx=amx, avx512=True)
    monkeypatch.setattr(library, "multiplies_bf16", lambda: True)
    mixer = make(case).float() if autocast else make(case).bfloat16()
    for n, grad in ((2048, True), (8192, True), (2048, False)):
        x = torch.zeros(2, n, 12, dtype=torch.float32 if autocast else torch.bfloat16)
        with torch.set_grad_enabled(grad), torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            choice = polymix.explain(mixer, x)[0]
        few = grad and not amx and case.startswith("poly") and n == 2048
        assert choice.impl == ("eager" if few else "native"), choice.why
        assert ("fewer than 16384 tokens" in choice.why) == few


def test_a_small_model_learns_on_it():
    """Steps of an optimizer keep pace with those on eager code."""
    losses = []
    for impl in ("native", "eager"):
        mixer = of(make("padre: 2-D").float(), impl)
        x, expected = tokens(4, 35, 12, dtype=torch.float32), tokens(4, 35, 12, seed=1, dtype=torch.float32)
        optimizer = torch.optim.AdamW(mixer.parameters(), lr=1e-2)
        losses.append([])
        for _ in range(20):
            loss = (mixer(x) - expected).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[-1].append(loss.item())
    assert losses[0] == pytest.approx(losses[1], rel=1e-3) and losses[0][-1] < 0.9 * losses[0][0]
    assert not math.isnan(losses[0][-1])


def test_a_class_token_stops_no_layer_of_a_converted_model():
    cure_torchvision()
    timm = pytest.importorskip("timm", reason="untested: timm's models, without timm")
    model = timm.create_model("vit_tiny_patch16_224", img_size=32, depth=2, num_classes=3)
    x = torch.randn(1, 3, 32, 32)
    for mixer in ("padre", "padre:degree=3", "pom", "qt", "poly_nl"):
        converted = polymix.convert(model, mixer, copy=True).model
        for inference in (True, False):
            with torch.inference_mode(inference):
                layers = polymix.explain(converted, x)
            assert [layer.impl for layer in layers] == ["native"] * 2, layers
