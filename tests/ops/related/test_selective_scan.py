"""The selective scan against its recurrence, stepped token by token in float64."""

import pytest
import torch
import torch._dynamo.testing
import torch.nn.functional as F

import polymix.ops.related.selective_scan as scan_module
from polymix.errors import ShapeError
from polymix.ops.related.selective_scan import linear_scan, selective_scan
from tests.helpers import Golden, close, tokens

GOLDEN = Golden("mamba_selective_scan")


def stepped(u, delta, A, B, C, D=None, z=None, delta_bias=None, *, delta_softplus=False, mask=None, state=None):
    """The definition, token by token and channel by channel."""
    batch, n, channels = u.shape
    step = delta if delta_bias is None else delta + delta_bias
    step = F.softplus(step) if delta_softplus else step

    def at(x, b, t, d):
        if x.ndim == 2:
            return x[d]
        return x[b, t] if x.ndim == 3 else x[b, t, d // (channels // x.shape[2])]

    rows, ends = [], []
    for b in range(batch):
        h = [torch.zeros_like(A[0]) if state is None else state[b, d] for d in range(channels)]
        for t in range(n):
            row = []
            for d in range(channels):
                if mask is None or mask[b, t]:
                    h[d] = torch.exp(step[b, t, d] * A[d]) * h[d] + step[b, t, d] * at(B, b, t, d) * u[b, t, d]
                y = (at(C, b, t, d) * h[d]).sum() + (0 if D is None else D[d] * u[b, t, d])
                row.append(y if z is None else y * F.silu(z[b, t, d]))
            rows.append(torch.stack(row))
        ends.append(torch.stack(h))
    return torch.stack(rows).view(batch, n, channels), torch.stack(ends)


def inputs(n, b="token", c="token", full=True, batch=2, channels=4, size=3):
    shapes = {"token": (batch, n, size), "group": (batch, n, 2, size), "constant": (channels, size)}
    parts = {
        "u": tokens(batch, n, channels), "delta": tokens(batch, n, channels, seed=1).abs(),
        "A": -tokens(channels, size, seed=2).exp(), "B": tokens(*shapes[b], seed=3), "C": tokens(*shapes[c], seed=4),
    }  # fmt: skip
    if full:
        parts |= {"D": tokens(channels, seed=5), "z": tokens(batch, n, channels, seed=6)}
        parts |= {"delta_bias": tokens(channels, seed=7), "state": tokens(batch, channels, size, seed=8)}
    return parts


@pytest.mark.parametrize("case", list(GOLDEN.meta))
def test_public_implementation(case):
    """Outputs, the last state and all gradients; the public code puts channels before tokens."""
    narrow = case.endswith("_f32")
    leaves = {key: value.clone().requires_grad_() for key, value in GOLDEN.part(case, "in").items()}
    parts = {key: x.transpose(1, 2) if x.ndim == 3 else x for key, x in leaves.items()}
    parts["D"] = parts.pop("Dskip", None)
    softplus = "delta_softplus=True" in GOLDEN.meta[case]["call"]
    out, last = selective_scan(**parts, delta_softplus=softplus)
    expected = GOLDEN.part(case, "out")
    assert out.dtype == expected["out"].dtype
    close(out.transpose(1, 2), expected["out"], 3e-6 if narrow else 1e-12)
    close(last, expected["last_state"], 3e-6 if narrow else 1e-12)
    (out.transpose(1, 2) * GOLDEN.part(case, "cot")["out"]).sum().backward()
    grads = GOLDEN.part(case, "grad/in")
    assert grads.keys() == leaves.keys()
    for key, value in grads.items():
        close(leaves[key].grad, value, 3e-5 if narrow else 1e-11)


@pytest.mark.parametrize("n", [1, 2, 15, 16, 17, 40])
@pytest.mark.parametrize("kinds", [("token", "token"), ("group", "constant"), ("constant", "group")])
@pytest.mark.parametrize("full", [True, False])
def test_equals_the_recurrence(n, kinds, full):
    parts = inputs(n, *kinds, full=full)
    for ours, expected in zip(selective_scan(**parts), stepped(**parts), strict=True):
        close(ours, expected, 1e-13)


def test_padding_does_not_change_the_state():
    """For any values and any positions of padding."""
    parts, mask = inputs(23), torch.rand(2, 23, generator=torch.Generator().manual_seed(0)) > 0.4
    y, last = stepped(**parts, mask=mask)
    for key in ("u", "delta", "B"):
        parts[key] = parts[key].masked_fill(~mask.unsqueeze(-1), torch.nan)
    ours, end = selective_scan(**parts, mask=mask)
    close(end, last, 1e-13)
    close(ours[mask], y[mask], 1e-13)


def test_blocks_and_chunks_equal_a_single_call(monkeypatch):
    """Blocks bound the memory; chunks with a carried state are what prefill does."""
    parts = inputs(75, "group")
    whole, end = selective_scan(**parts, delta_softplus=True)
    monkeypatch.setattr(scan_module, "BLOCK", 20)
    for ours, expected in zip(selective_scan(**parts, delta_softplus=True), (whole, end), strict=True):
        close(ours, expected, 1e-13)
    state, out = parts["state"], []
    for start, stop in ((0, 1), (1, 34), (34, 75)):
        piece = {k: v[:, start:stop] if v.ndim > 2 else v for k, v in parts.items() if k != "state"}
        y, state = selective_scan(**piece, state=state, delta_softplus=True)
        out.append(y)
    close(torch.cat(out, 1), whole, 1e-13)
    close(state, end, 1e-13)


@pytest.mark.parametrize("n", [1, 5, 18])
def test_first_and_second_derivatives(n):
    parts = inputs(n, "group", "constant", batch=1, channels=2, size=2)
    names = list(parts)

    def run(*values):
        return selective_scan(**dict(zip(names, values, strict=True)), delta_softplus=True)

    leaves = [value.requires_grad_() for value in parts.values()]
    assert torch.autograd.gradcheck(run, leaves, fast_mode=n > 5)
    assert torch.autograd.gradgradcheck(run, leaves, fast_mode=True)


@pytest.mark.parametrize("size", [1e3, 1e-8])
def test_large_and_small_steps_stay_finite(size):
    """exp(Δ A) underflows to zero, so dividing by products of decays would give NaN."""
    parts = {key: value.float() for key, value in inputs(300).items()}
    parts["delta"] = (parts["delta"] * size).requires_grad_()
    y, end = selective_scan(**parts, delta_softplus=True)
    y.sum().backward()
    assert y.isfinite().all()
    assert end.isfinite().all()
    assert parts["delta"].grad.isfinite().all()


def test_low_precision_keeps_a_wide_state():
    parts = inputs(200)
    low = {key: value.bfloat16() for key, value in parts.items()}
    y, end = selective_scan(**low, delta_softplus=True)
    assert y.dtype == torch.bfloat16
    assert end.dtype == torch.float32
    exact, last = selective_scan(**{key: value.double() for key, value in low.items()}, delta_softplus=True)
    close(y.double(), exact, 2**-7)
    close(end.double(), last, 1e-5)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(selective_scan(**low, delta_softplus=True)[0], y)


def test_one_graph_for_every_length():
    torch._dynamo.reset()
    counter = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(selective_scan, fullgraph=True, dynamic=True, backend=counter)
    for n in (13, 29, 70, 5):
        parts = {key: value.requires_grad_() for key, value in inputs(n).items()}
        y, end = compiled(**parts)
        plain, last = selective_scan(**parts)
        close(y, plain, 1e-12)
        close(end, last, 1e-12)
        ours, eager = (torch.autograd.grad(out.sum(), (parts["delta"], parts["state"])) for out in (y, plain))
        for a, b in zip(ours, eager, strict=True):
            close(a, b, 1e-12)
    assert counter.frame_count == 1, "a new length must not compile again"


def test_the_scan_is_a_valid_op():
    """torch.library checks the schema, fake tensors, autograd and dynamic shapes; and vmap works."""
    a, b, start = tokens(2, 19, 3).sigmoid(), tokens(2, 19, 3, seed=1), tokens(2, 3, seed=2)
    for reverse in (False, True):
        leaves = [x.clone().requires_grad_() for x in (a, b, start)]
        torch.library.opcheck(torch.ops.polymix.linear_scan.default, (*leaves, reverse))
        many = torch.vmap(linear_scan, (0, None, 1, None))(
            torch.stack((a, a / 2)), b, torch.stack((start,) * 2, 1), reverse
        )
        close(many[1], linear_scan(a / 2, b, start, reverse), 1e-14)


def test_errors_come_before_any_compute():
    parts = inputs(6)
    for key, bad in (
        ("u", tokens(6, 4)), ("delta", tokens(2, 6, 3)), ("A", tokens(3, 3)), ("B", tokens(2, 6, 4)),
        ("C", tokens(2, 6, 3, 3)), ("state", tokens(2, 3, 4)),
    ):  # fmt: skip
        with pytest.raises(ShapeError, match=f"`{key}`"):
            selective_scan(**{**parts, key: bad})
