"""PoM's Triton kernels against the written-out sums in float64; all memory of the launchers starts as NaN."""

from functools import partial

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polymix.ops.shared.activations import ACTIVATIONS
from tests.ops.kernels import (
    DEVICE,
    assert_close,
    assert_same_bits,
    to_float64,
    twice_the_error,
    with_gradients,
)

pytest.importorskip("triton", reason="untested: PoM's Triton kernels, which need Triton")

from polymix.ops.pom import PomOptions, PomWeights, linear_powers, triton_powers
from polymix.ops.pom import pom as pom_mixer
from polymix.ops.pom import triton as pom

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unwritten_is_nan")]
NAMES = ("output", "grad_h", "grad_alpha")


def make(batch, n, width, degree, *, dtype=torch.float32, masked=False, rotary=0, sort=False, ids=None, start=False):
    """h, alpha, the options of both launchers, and the options of `scan` only."""
    h = (0.7 * torch.randn(batch, n, width)).to(DEVICE, dtype)
    alpha = torch.randn(width, degree).to(DEVICE)
    both, scan_only = {}, {}
    if masked:
        mask = torch.rand(batch, n) < 0.7
        mask[-1] = False
        both["mask"] = mask.to(DEVICE)
        h[~both["mask"]] = float("nan")
    if rotary:
        angles = 6 * torch.rand(1 if rotary == 1 else batch, n, width // 2, device=DEVICE)
        both |= {"cos": angles.cos(), "sin": angles.sin(), "axes": rotary}
    if sort:
        scan_only["order"] = torch.rand(batch, n).argsort(1).to(DEVICE)
    if ids is not None:
        ids = torch.randint(ids, (batch, n)).sort(1).values
        scan_only["first"] = torch.searchsorted(ids, ids).to(DEVICE)
    if start:
        scan_only["start"] = torch.randn(batch, width).to(DEVICE)
    return h, alpha, both, scan_only


def terms(h, alpha, activation, mask=None, cos=None, sin=None, axes=1):
    """The terms in the dtype of h, power by power, with the rotation as a complex product."""
    if mask is not None:
        h = torch.where(mask[..., None], h, torch.zeros_like(h))
    a = ACTIVATIONS[activation](h)
    t = sum(alpha[:, p].to(h.dtype) * a ** (p + 1) for p in range(alpha.shape[1]))
    if cos is None:
        return t
    z = t.unflatten(-1, (axes, 2, -1)).double()
    z = torch.complex(z[..., 0, :], z[..., 1, :]) * torch.complex(
        *(x.double().unflatten(-1, (axes, -1)) for x in (cos, sin))
    )
    return torch.stack((z.real, z.imag), -2).flatten(-3).to(t.dtype)


def eager(h, alpha, activation, both, scan_only, running):
    """The sums, by a dense matrix of which token sees which."""
    t = terms(h, alpha, activation, **both)
    t = t.to(torch.promote_types(t.dtype, torch.float32))
    if not running:
        return t.sum(1)
    n = h.shape[1]
    if "order" in scan_only:
        t = t.gather(1, scan_only["order"][..., None].expand_as(t))
    place = torch.arange(n, device=h.device)
    first = scan_only.get("first", torch.zeros(h.shape[:2], dtype=torch.int64, device=h.device))
    sees = (place[None, None, :] <= place[None, :, None]) & (place[None, None, :] >= first[:, :, None])
    total = sees.to(t.dtype) @ t
    return total + scan_only["start"][:, None].to(t.dtype) if "start" in scan_only else total


def answers(h, alpha, activation, both, scan_only, running, grad, dtype=torch.float64):
    """The output, grad_h and grad_alpha by autograd in `dtype`."""
    if "mask" in both:
        h = h.masked_fill(~both["mask"][..., None], 0)
    how = {"activation": activation, "both": both, "scan_only": scan_only, "running": running}
    return with_gradients(eager, grad, h.to(dtype), alpha.to(dtype), **how)


def kernels(h, alpha, activation, both, scan_only, running, grad):
    call = {"activation": activation, **both}
    if not running:
        return pom.pool(h, alpha, **call), *pom.pool_backward(grad, h, alpha, **call)
    back = {key: value for key, value in scan_only.items() if key != "start"}
    grad_h, grad_alpha, _ = pom.scan_backward(grad, h, alpha, **call, **back)
    return pom.scan(h, alpha, **call, **scan_only), grad_h, grad_alpha


def check(h, alpha, activation="gelu", both=None, scan_only=None, running=True, grad=None):
    both, scan_only = both or {}, scan_only or {}
    shape = h.shape if running else (h.shape[0], h.shape[2])
    grad = torch.randn(shape).to(h.device) if grad is None else grad
    got = kernels(h, alpha, activation, both, scan_only, running, grad)
    want, allowed = answers(h, alpha, activation, both, scan_only, running, grad), None
    if h.dtype != torch.float32:
        plain = answers(h, alpha, activation, both, scan_only, running, grad, h.dtype)
        allowed = twice_the_error(plain, want, h.dtype)
    assert_close(NAMES, got, want, allowed)
    assert got[0].dtype == got[2].dtype == torch.float32 and got[1].dtype == h.dtype, "sums must be float32"
    if "mask" in both:
        assert (got[1][~both["mask"]] == 0).all(), "padding must have no gradient"


SHAPES = [(2, 1, 12, 1), (2, 63, 12, 2), (1, 100, 60, 3), (1, 257, 4, 5), (1, 5, 192, 2)]


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_odd_shapes_at_every_degree(shape, running):
    h, alpha, both, scan_only = make(*shape, start=running)
    check(h, alpha, both=both, scan_only=scan_only, running=running)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_at_its_kinks(activation, running):
    h, alpha, *_ = make(1, 40, 4, 3)
    h[0, :9, 0] = torch.tensor([0.0, -0.0, -5.0, -30.0, 6.5, 1e-20, -1e-20, -11.0, 5.9])
    check(h, alpha, activation, running=running)


OPTIONS = {
    "masked": {"masked": True},
    "rotary": {"rotary": 1},
    "grid": {"rotary": 2, "masked": True},
    "segments": {"ids": 4},
    "one token a segment": {"ids": 5000},
    "everything": {"masked": True, "rotary": 1, "sort": True, "ids": 3},
    "everything on a grid": {"masked": True, "rotary": 2, "sort": True, "ids": 3},
    "sorted": {"sort": True, "start": True, "masked": True},
}


@pytest.mark.parametrize("splits", [2, 4])  # of two tiles, of one
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_options_with_any_number_of_splits(options, splits, monkeypatch):
    monkeypatch.setattr(pom, "TILE", 16)
    monkeypatch.setattr(pom, "PROGRAMS", splits * 2 * max(1, options.get("rotary", 0)))
    h, alpha, both, scan_only = make(2, 50, 12, 2, **options)
    check(h, alpha, both=both, scan_only=scan_only)
    if not scan_only:
        check(h, alpha, both=both, running=False)


def test_pool_with_more_channels_than_a_block():
    for options in ({"masked": True}, {"rotary": 1}, {"rotary": 2}):
        h, alpha, both, _ = make(2, 10, 140, 2, **options)
        check(h, alpha, both=both, running=False)


@pytest.mark.parametrize("ids", [None, 2])
def test_more_splits_than_a_tile(ids, monkeypatch):
    monkeypatch.setattr(pom, "TILE", 4)
    h, alpha, both, scan_only = make(1, 63, 4, 2, ids=ids)
    check(h, alpha, both=both, scan_only=scan_only)


def test_segments_that_begin_at_a_split(monkeypatch):
    monkeypatch.setattr(pom, "TILE", 4)
    h, alpha, *_ = make(1, 20, 4, 2)
    check(h, alpha, scan_only={"first": (torch.arange(20, device=DEVICE) // 8 * 8)[None]})


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_as_good_as_eager_code(dtype, running):
    h, alpha, both, scan_only = make(2, 33, 12, 3, dtype=dtype, masked=True, rotary=1)
    check(h, alpha, both=both, scan_only=scan_only, running=running)


@pytest.mark.parametrize("running", [False, True])
def test_any_strides(running):
    h, alpha, *_ = make(2, 40, 12, 2)
    grad = torch.randn(40, 12, 2, device=DEVICE).permute(2, 0, 1) if running else torch.randn(12, 2, device=DEVICE).T
    check(h.mT.contiguous().mT, alpha.T.contiguous().T, running=running, grad=grad)
    wide = torch.full((3, 80, 25), float("nan"), device=DEVICE)
    wide[1:, ::2, 1::2] = h
    mask, angles = torch.rand(40, 2, device=DEVICE).T < 0.7, torch.rand(2, 6, 40, device=DEVICE).mT
    order, first = (
        torch.arange(40, device=DEVICE).flip(0).expand(2, 40),
        torch.zeros(40, 2, dtype=int, device=DEVICE).T,
    )
    both = {"mask": mask, "cos": angles.cos(), "sin": angles.sin().contiguous()}
    scan_only = {"order": order, "first": first} if running else {}
    check(wide[1:, ::2, 1::2], alpha, both=both, scan_only=scan_only, running=running, grad=grad)


@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12)])
@pytest.mark.parametrize("running", [False, True])
def test_empty_inputs(shape, running):
    h, alpha = torch.zeros(shape, device=DEVICE), torch.ones(12, 2, device=DEVICE)
    grad = torch.ones(shape if running else (shape[0], 12), device=DEVICE)
    turn = torch.zeros(shape[0], shape[1], 6, device=DEVICE)
    out, grad_h, grad_alpha = kernels(h, alpha, "gelu", {"cos": turn, "sin": turn}, {}, running, grad)
    assert out.shape == grad.shape and (out == 0).all(), "an empty sum must be zero"
    assert grad_h.shape == shape and grad_alpha.shape == (12, 2) and (grad_alpha == 0).all(), (
        "an empty input must give zero gradients"
    )


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter's arithmetic is NumPy's
def test_segments_do_not_affect_each_other():
    h, alpha, _, scan_only = make(1, 70, 4, 2, ids=3)
    begins = scan_only["first"].unique().tolist()
    grad = torch.randn(h.shape, device=DEVICE)
    before = kernels(h, alpha, "gelu", {}, scan_only, True, grad)
    h[:, begins[1] : begins[2]] = torch.tensor([1e18, float("nan"), float("inf"), 3.0], device=DEVICE)
    grad[:, begins[1] : begins[2]] *= 1e30
    after = kernels(h, alpha, "gelu", {}, scan_only, True, grad)
    for x, y in zip(before[:2], after[:2], strict=True):
        for part in (slice(0, begins[1]), slice(begins[2], None)):
            assert torch.equal(x[:, part], y[:, part]), "a segment depends on another one"


def test_a_nan_of_a_real_token_is_kept():
    for activation in ACTIVATIONS:
        h = torch.zeros(1, 3, 4, device=DEVICE)
        h[0, 1, 2] = float("nan")
        out = pom.pool(h, torch.ones(4, 2, device=DEVICE), activation=activation)
        assert out.isnan().tolist() == [[False, False, True, False]], f"{activation} swallows or spreads a NaN"


@pytest.mark.parametrize("running", [False, True])
def test_same_input_same_bits(running):
    h, alpha, both, scan_only = make(2, 40, 12, 3, masked=True, rotary=1)
    grad = torch.randn(h.shape if running else (2, 12), device=DEVICE)
    one, two = (kernels(h, alpha, "gelu", both, scan_only, running, grad) for _ in range(2))
    assert_same_bits(NAMES, one, two, "two runs differ")


@pytest.mark.skipif(DEVICE == "cpu", reason="untested: offsets beyond 2³¹, for which 4 GiB of a GPU are needed")
def test_offsets_beyond_two_to_the_31():
    far = torch.zeros(2**31 + 64, dtype=torch.bfloat16, device=DEVICE)
    far[-64:] = 1
    h = far.as_strided((1, 2, 12), (0, 2**31, 1))
    out = pom.pool(h, torch.ones(12, 1, device=DEVICE), activation="identity")
    assert (out == 1).all(), "an offset wrapped around"


def test_the_gradient_of_the_start_is_the_sum_of_all_gradients():
    h, alpha, both, scan_only = make(2, 9, 8, 2, start=True)
    grad = torch.randn(2, 9, 8, device=DEVICE)
    *_, grad_start = pom.scan_backward(grad, h, alpha, activation="gelu", **both, **scan_only)
    torch.testing.assert_close(grad_start, grad.sum(1))


def _powers(x, weight, bias, *, mask, activation, degree, impl):
    return linear_powers(x, weight, bias, mask, activation, degree, impl=impl)


def _one_pass(batch, n, dim, width, *, dtype=torch.float32, masked=True):
    """Tokens and weights of odd strides, a bias, and a mask whose last row is padding only; padding is NaN."""
    x = torch.randn(batch, 2 * n, dim + 1).to(DEVICE, dtype)[:, ::2, 1:]
    weight, bias = (torch.randn(dim, width) / dim**0.5).to(DEVICE, dtype).t(), torch.randn(width).to(DEVICE, dtype)
    if not masked:
        return x, weight, bias, None
    mask = (torch.rand(batch, n) < 0.7).to(DEVICE)
    mask[-1] = False
    x[~mask] = float("nan")
    return x, weight, bias, mask


def _check_one_pass(x, weight, bias, mask, degree, activation="gelu"):
    grad = torch.randn(len(x), degree, len(weight)).to(DEVICE)
    fixed = {"mask": mask, "activation": activation, "degree": degree}
    ours = with_gradients(partial(_powers, impl="triton", **fixed), grad, x, weight, bias)
    clean = x if mask is None else x.masked_fill(~mask[..., None], 0)
    exact = with_gradients(partial(_powers, impl="eager", **fixed), *to_float64(grad, clean, weight, bias))
    allowed = [1e-4 if x.dtype == torch.float32 else 2e-2] * 4
    assert_close(("sums", "x", "weight", "bias"), ours, exact, allowed)
    assert ours[0].dtype == torch.float32, "sums must be float32"


@pytest.mark.parametrize(
    ("batch", "n", "dim", "width", "degree"), [(2, 70, 24, 40, 2), (2, 1, 5, 3, 1), (3, 200, 130, 70, 3)]
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_the_product_in_the_same_pass(batch, n, dim, width, degree, dtype, monkeypatch):
    """One pass gives the sums of its two, forward and backward: columns, tokens and the inner sum overrun their tiles."""
    monkeypatch.setattr(triton_powers, "PROGRAMS", 4)  # several tiles of tokens in a program
    for masked, biased in ((True, True), (True, False), (False, True)):
        x, weight, bias, mask = _one_pass(batch, n, dim, width, dtype=dtype, masked=masked)
        _check_one_pass(x, weight, bias if biased else None, mask, degree)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation_in_the_same_pass(activation):
    """Padding adds nothing although act(0 + b) is no zero."""
    _check_one_pass(*_one_pass(2, 40, 20, 12), 3, activation)


def test_one_pass_over_an_empty_batch():
    x, weight, bias, _ = _one_pass(0, 5, 6, 4, masked=False)
    fixed = {"mask": None, "activation": "gelu", "degree": 2, "impl": "triton"}
    sums, grad_x, *grads = with_gradients(
        partial(_powers, **fixed), torch.ones(0, 2, 4, device=DEVICE), x, weight, bias
    )
    assert sums.shape == (0, 2, 4) and grad_x.shape == x.shape
    assert all((part == 0).all() for part in grads), "an empty batch must give zero gradients"


def test_one_pass_gives_the_same_bits_and_keeps_a_nan():
    x, weight, bias, mask = _one_pass(2, 150, 20, 12)
    one, two = (_powers(x, weight, bias, mask=mask, activation="gelu", degree=2, impl="triton") for _ in range(2))
    assert_same_bits(("sums",), (one,), (two,), "two runs differ")
    x = x.nan_to_num()
    x[0, 7, 3] = float("nan")
    out = _powers(x, weight, bias, mask=None, activation="gelu", degree=2, impl="triton")
    assert out[0].isnan().all() and not out[1].isnan().any(), "a NaN is swallowed, or reaches another sequence"


@pytest.mark.parametrize("dim", [96, 97])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_pom_takes_one_pass_where_it_is_shorter(dim, trained, masked):
    """Without gradients and with few channels; either way the mixer's output is that of plain PyTorch."""
    x, width = torch.randn(2, 20, dim, device=DEVICE), 32
    poly, gate, proj = (
        (torch.randn(out, into, device=DEVICE) / into**0.5, torch.randn(out, device=DEVICE))
        for out, into in ((width, dim), (width, dim), (dim, width))
    )
    weights = PomWeights(poly, gate, proj, torch.randn(width, 2, device=DEVICE))
    mask = (torch.arange(20, device=DEVICE) < torch.tensor([[20], [0]], device=DEVICE)) if masked else None
    with torch.set_grad_enabled(trained), Operators() as operators:
        ours = pom_mixer(x, x, weights, PomOptions(), mask=mask, impl="triton")
    expected = pom_mixer(x, x, weights, PomOptions(), mask=mask, impl="eager")
    one_pass = dim == 96 and not trained
    assert operators.names == {"linear_powers" if one_pass else "pom_pool"}
    assert_close(("output",), (ours,), (expected,))


class Operators(TorchDispatchMode):
    """The names of the operators that run."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "polymix":
            self.names.add(func._schema.name.removeprefix("polymix::"))
        return func(*args, **(kwargs or {}))
