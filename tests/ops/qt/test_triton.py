"""The Triton kernels of quadratic-Taylor attention against the equation written out in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from polymix.ops.qt.eager import feature_size, taylor_features
from tests.ops.kernels import DEVICE

pytest.importorskip("triton", reason="untested: QT's Triton kernels, which need Triton")

from polymix.ops.qt import triton as qt
from polymix.ops.qt import triton_causal as qt_causal

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("unwritten_is_nan")]
HALF = [torch.bfloat16, torch.float16]
FORMS = [("full", 0), ("full", 1), ("full", 2), ("compact", 0), ("compact", 1), ("compact", 2)]


@pytest.fixture(autouse=True)
def _short_chunks(monkeypatch):
    """Short chunks, so that few tokens fill several."""
    monkeypatch.setattr(qt_causal, "CHUNK", 64)


def _inputs(n, d, heads=1, batch=1, dtype=torch.float32, mask=False):
    """q, k, v as views of one (B, N, 3D) product, so that they are not contiguous; masked tokens are NaN."""
    product = torch.randn(batch, n, 3 * heads * d).to(DEVICE, dtype)
    q, k, v = product.unflatten(-1, (3, heads, d)).permute(2, 0, 3, 1, 4)
    if not mask:
        return q, k, v, None
    real = torch.rand(batch, 2 * n).to(DEVICE)[:, ::2] > 0.4
    real[-1] = False  # the last row has no real token
    hidden = ~real[:, None, :, None]
    return q, k.masked_fill(hidden, float("nan")), v.masked_fill(hidden, float("nan")), real


def _scale(form, heads=1):
    return torch.rand(3, heads, 1, 1).to(DEVICE) + 0.5 if form == "compact" else None


def _exact(tensors):
    """The same values as float64 leaves, with 0 for the NaN at padding."""
    return [None if t is None else t.detach().double().nan_to_num(0.0).requires_grad_() for t in tensors]


def _moments(k, v, form, order, scale, mask):
    phi, rows = taylor_features(k, form, order, scale), torch.cat((v, torch.ones_like(v[..., :1])), -1)
    if mask is not None:
        rows = rows * mask[:, None, :, None]
    return torch.einsum("bhnf,bhne->bhfe", phi, rows)


def _causal(q, k, v, start, form, order, scale, mask):
    """The definition, computed for every pair of tokens, without chunks."""
    queries, keys = taylor_features(q, form, order, scale), taylor_features(k, form, order, scale)
    rows = torch.cat((v, torch.ones_like(v[..., :1])), -1)
    if mask is not None:
        rows = rows * mask[:, None, :, None]
    end = torch.einsum("bhnf,bhne->bhfe", keys, rows)
    weighted = (queries @ keys.transpose(-1, -2)).tril() @ rows
    return (weighted, end) if start is None else (weighted + queries @ start, end + start)


def _close(ours: Tensor | None, exact: Tensor | None, what: str, dtype=torch.float32) -> None:
    """Within 1e-4 of the largest entry; with 16 bits, within 1e-3 plus the rounding of the exact result.

    Within 2e-3 on a GPU, whose tensor cores read a feature, a product of two entries of 8 or 11 bits, with 11 bits.
    """
    if exact is None:
        assert ours is None, f"{what} is not None"
        return
    assert ours is not None and ours.shape == exact.shape, f"{what} has the wrong shape"
    assert not ours.isnan().any(), f"{what} has NaN: it was not written, or padding was read"
    if not exact.numel():
        return
    rounding = torch.finfo(ours.dtype).eps * exact.abs()
    excess = ((ours.double() - exact).abs() - rounding).max() / exact.abs().max().clamp_min(1e-30)
    assert excess <= (1e-4 if dtype == torch.float32 else 2e-3 if DEVICE == "cuda" else 1e-3), (
        f"{what} has a relative error of {excess:.2e}"
    )


def _check_pooled(n, d, form, order, heads=1, batch=1, dtype=torch.float32, mask=False, queries=None):
    q, k, v, real = _inputs(n, d, heads, batch, dtype, mask)
    q = q if queries is None else torch.randn(batch, heads, queries, d).to(DEVICE, dtype)
    scale, options = _scale(form, heads), {"form": form, "order": order}
    pooled = qt.moments(k, v, **options, scale=scale, mask=real)
    asked = qt.query(q, pooled, **options, scale=scale)
    assert pooled.dtype == asked.dtype == torch.float32, "sums must be float32"

    k64, v64, scale64 = _exact((k, v, scale))
    exact = _moments(k64, v64, form, order, scale64, real)
    _close(pooled, exact, "moments", dtype)
    grad = torch.randn(exact.shape).to(DEVICE)
    inputs = [t for t in (k64, v64, scale64) if t is not None]
    grads = torch.autograd.grad(exact, inputs, grad.double(), allow_unused=True, materialize_grads=True)
    ours = qt.moments_backward(grad, k, v, **options, scale=scale, mask=real)
    assert ours[0].dtype == ours[1].dtype == dtype, "a gradient must have the dtype of its input"
    for one, other, what in zip(ours, (*grads, None), ("grad k", "grad v", "grad scale"), strict=False):
        _close(one, other, what, dtype)

    q64, scale64, state = _exact((q, scale, pooled))
    exact = taylor_features(q64, form, order, scale64) @ state
    _close(asked, exact, "asked", dtype)
    grad = torch.randn(*exact.shape[:2], exact.shape[3], exact.shape[2]).to(DEVICE).transpose(-1, -2)
    inputs = [t for t in (q64, state, scale64) if t is not None]
    grads = torch.autograd.grad(exact, inputs, grad.double(), allow_unused=True, materialize_grads=True)
    ours = qt.query_backward(grad, q, pooled, **options, scale=scale)
    for one, other, what in zip(ours, (*grads, None), ("grad q", "grad moments", "grad scale"), strict=False):
        _close(one, other, what, dtype)


def _check_causal(n, d, form, order, heads=1, batch=1, dtype=torch.float32, mask=False, started=True):
    q, k, v, real = _inputs(n, d, heads, batch, dtype, mask)
    scale, options = _scale(form, heads), {"form": form, "order": order}
    size = feature_size(d, form, order)
    start = torch.randn(batch, heads, size, d + 1).to(DEVICE) if started else None
    ours = qt_causal.causal(q, k, v, **options, scale=scale, mask=real, start=start)
    q64, k64, v64, scale64, start64 = _exact((q, k, v, scale, start))
    exact = _causal(q64, k64, v64, start64, form, order, scale64, real)
    for one, other, what in zip(ours, exact, ("weighted", "end"), strict=True):
        _close(one, other, what, dtype)

    grads = [torch.randn(part.shape).to(DEVICE) for part in exact]
    leaves = (q64, k64, v64, scale64, start64)
    inputs = [t for t in leaves if t is not None]
    found = iter(
        torch.autograd.grad(exact, inputs, [g.double() for g in grads], allow_unused=True, materialize_grads=True)
    )
    ours = qt_causal.causal_backward(*grads, q, k, v, **options, scale=scale, mask=real, start=start)
    for one, leaf, what in zip(ours, leaves, ("grad q", "grad k", "grad v", "grad scale", "grad start"), strict=True):
        _close(one, None if leaf is None else next(found), what, dtype)


@pytest.mark.parametrize(("form", "order"), FORMS)
def test_pooled_equals_the_equation(form, order):
    _check_pooled(40, 4, form, order, heads=2)


@pytest.mark.parametrize(
    ("n", "d", "heads", "queries"), [(1, 16, 3, 1), (63, 20, 1, 7), (257, 4, 1, None), (0, 4, 2, 3)]
)
@pytest.mark.parametrize("form", ["full", "compact"])
def test_pooled_at_odd_sizes(form, n, d, heads, queries):
    _check_pooled(n, d, form, 2, heads, queries=queries)


@pytest.mark.parametrize("form", ["full", "compact"])
def test_masked_tokens_have_no_effect(form):
    _check_pooled(40, 4, form, 2, batch=2, mask=True)
    _check_causal(70, 4, form, 2, batch=2, mask=True)


@pytest.mark.parametrize("form", ["full", "compact"])
@pytest.mark.parametrize("dtype", HALF)
def test_sixteen_bits(form, dtype):
    _check_pooled(33, 5, form, 2, dtype=dtype)
    _check_causal(33, 5, form, 2, dtype=dtype)


@pytest.mark.parametrize(("form", "order"), FORMS)
def test_causal_equals_the_equation(form, order):
    _check_causal(70, 4, form, order)


@pytest.mark.parametrize(
    ("n", "d", "heads", "started"), [(1, 16, 3, True), (63, 20, 1, False), (257, 4, 1, True), (0, 4, 2, True)]
)
@pytest.mark.parametrize("form", ["full", "compact"])
def test_causal_at_odd_sizes(form, n, d, heads, started):
    _check_causal(n, d, form, 2, heads, started=started)


def test_no_future_token_is_seen():
    q, k, v, _ = _inputs(80, 4)
    before, _ = qt_causal.causal(q, k, v, form="full", order=2)
    k, v = k.clone(), v.clone()
    k[:, :, 70:], v[:, :, 70:] = 1e3, -1e3
    after, _ = qt_causal.causal(q, k, v, form="full", order=2)
    assert torch.equal(before[:, :, :70], after[:, :, :70]), "a token depends on a later one"


def test_an_empty_batch():
    q = torch.randn(0, 2, 5, 4, device=DEVICE)
    assert qt.query(q, qt.moments(q, q, form="full", order=2), form="full", order=2).shape == (0, 2, 5, 5)
    assert qt_causal.causal(q, q, q, form="full", order=2)[0].shape == (0, 2, 5, 5)


def test_every_pair_of_a_wide_head_is_found_once():
    """The indices of the features in the triangle are computed, and must cover it at every width."""
    d = 67
    x = torch.randn(1, 1, 1, d, device=DEVICE)
    ours = qt.moments(x, torch.ones_like(x), form="full", order=2)[0, 0, :, -1]
    _close(ours, taylor_features(x.double(), "full", 2)[0, 0, 0], "features")


@pytest.mark.parametrize("form", ["full", "compact"])
def test_two_runs_give_the_same_bits(form):
    q, k, v, _ = _inputs(70, 4)
    scale, grad = _scale(form), torch.randn(1, 1, 70, 5).to(DEVICE)
    options = {"form": form, "order": 2, "scale": scale}

    def run():
        pooled = qt.moments(k, v, **options)
        weighted, end = qt_causal.causal(q, k, v, **options)
        return [
            pooled, weighted, end, *qt.query_backward(grad, q, pooled, **options),
            *qt.moments_backward(pooled, k, v, **options), *qt_causal.causal_backward(grad, end, q, k, v, **options),
        ]  # fmt: skip

    for one, other in zip(run(), run(), strict=True):
        assert one is other is None or torch.equal(one, other), "the same input gave different results"
