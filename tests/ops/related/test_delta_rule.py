"""The chunked delta rule against fla's plain code in float64, the recurrence token by token, and its scan of matrices."""

import pytest
import torch

from polymix.ops.related.delta_rule import delta_rule, matrix_scan
from tests.helpers import Golden, close, tokens

GOLDEN = Golden("delta_rule")


@pytest.mark.parametrize("case", list(GOLDEN.meta))
def test_outputs_states_and_gradients_of_fla(case):
    given = {key: value.clone().requires_grad_() for key, value in GOLDEN.part(case, "in").items()}
    q, k, v, g, beta = (given[key].transpose(1, 2) for key in ("q", "k", "v", "g", "beta"))
    g = g if g.ndim == 4 else g[..., None]
    y, state = delta_rule(q * q.shape[-1] ** -0.5, k, v, g, beta[..., None], state=given["initial_state"])
    out, cot = GOLDEN.part(case, "out"), GOLDEN.part(case, "cot")
    close(y.transpose(1, 2), out["y"], 1e-11)
    close(state, out["state"], 1e-11)
    ((y.transpose(1, 2) * cot["y"]).sum() + (state * cot["state"]).sum()).backward()
    for key, gradient in GOLDEN.part(case, "grad/in").items():
        close(given[key].grad, gradient, 1e-9)


def inputs(n, width, d=4):
    q, k, v = tokens(2, 3, n, d), torch.nn.functional.normalize(tokens(2, 3, n, d, seed=1), dim=-1), tokens(2, 3, n, 5)
    return q, k, v, -tokens(2, 3, n, width, seed=2).abs(), tokens(2, 3, n, 1, seed=3).sigmoid()


@pytest.mark.parametrize("width", [1, 4])
@pytest.mark.parametrize("n", [1, 15, 16, 17, 40])
def test_any_length_is_the_recurrence(width, n):
    q, k, v, g, beta = inputs(n, width)
    S, rows = torch.zeros(2, 3, 4, 5, dtype=torch.float64), []
    for t in range(n):
        S = g[:, :, t, :, None].exp() * S
        S = S + beta[:, :, t, :, None] * k[:, :, t, :, None] * (v[:, :, t, None] - k[:, :, t, None] @ S)
        rows.append((q[:, :, t, None] @ S)[:, :, 0])
    y, state = delta_rule(q, k, v, g, beta)
    close(y, torch.stack(rows, 2), 1e-12)
    close(state, S, 1e-12)


@pytest.mark.parametrize("width", [1, 4])
def test_strong_decays_and_equal_keys_stay_finite_and_exact_in_float32(width):
    """Quotients of products of decays would overflow, and powers of the triangle grow where all keys are equal."""
    q, k, v, g, beta = (part.clone() for part in inputs(64, width))
    k[:], beta[:] = k[:, :, :1], 1.0
    g[:, :, ::2], g[:, :, 1::2] = -1e4, -1e-6
    exact, end = delta_rule(q, k, v, g, beta)
    low = [part.float().requires_grad_() for part in (q, k, v, g, beta)]
    y, state = delta_rule(*low)
    close(y, exact.float(), 1e-5)
    close(state, end.float(), 1e-5)
    y.sum().backward()
    assert all(part.grad.isfinite().all() for part in low)


def test_the_scan_is_a_valid_op():
    """torch.library checks the schema, fake tensors, autograd and dynamic shapes; and vmap and functorch work."""
    step, gain, start = tokens(2, 3, 4, 2, 2), tokens(2, 3, 4, 2, 5, seed=1), tokens(2, 3, 2, 5, seed=2)
    leaves = [x.clone().requires_grad_() for x in (step, gain, start)]
    torch.library.opcheck(torch.ops.polymix.matrix_scan.default, leaves)
    assert torch.autograd.gradgradcheck(matrix_scan, leaves, fast_mode=True)
    many = torch.vmap(matrix_scan, (0, None, 1))(torch.stack((step, step / 2)), gain, torch.stack((start,) * 2, 1))
    close(many[1], matrix_scan(step / 2, gain, start), 1e-14)
    close(
        torch.func.jvp(matrix_scan, (step, gain, start), (step, gain, start))[0], matrix_scan(step, gain, start), 1e-14
    )
