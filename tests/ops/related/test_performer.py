"""FAVOR+ is exact for all logits, approaches softmax with enough features, and trains in bfloat16."""

import math

import pytest
import torch

import polymix
import polymix.mixers.related  # registers the mechanisms
from polymix.ops.related.performer import orthogonal_features, performer, performer_causal
from tests.helpers import build, close, tokens


def in_logarithms(q, k, v, omega, visible):
    """Σ_j κ_ij v_j / Σ_j κ_ij with κ_ij = Σ_m exp(a_im + b_jm), computed with logarithms."""
    d = q.shape[-1]

    def logarithm(t):
        t = t / d**0.25
        return t @ omega.t() - t.square().sum(-1, keepdim=True) / 2

    kappa = torch.logsumexp(logarithm(q).unsqueeze(-2) + logarithm(k).unsqueeze(-3), -1)
    return kappa.masked_fill(~visible, -torch.inf).softmax(-1) @ v


def draw(count, d, seed=0):
    return orthogonal_features(count, d, torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("spread", [1.0, 10.0, 100.0])
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_exact_for_all_logits(spread, causal, dtype):
    """With logits up to 10⁵, any stabiliser other than the maximum of each feature's sum would give 0 / 0."""
    n, d = 70, 8
    q, k, v = (tokens(2, 2, n, d, seed=s) for s in (1, 2, 3))
    q, k = spread * q, spread * k
    k[:, :, 5] *= 3  # an early outlier: the tokens before and after it must keep their weights
    omega = draw(11, d)
    visible = torch.ones(n, n, dtype=torch.bool).tril() if causal else torch.ones(n, n, dtype=torch.bool)
    function = (lambda *args: performer_causal(*args)[0]) if causal else performer
    y = function(*(part.to(dtype) for part in (q, k, v)), omega.to(dtype))
    # A float32 logit of 10⁴ is itself only exact to 10⁻³.
    assert y.isfinite().all()
    if dtype == torch.float64:
        close(y, in_logarithms(q, k, v, omega, visible), 1e-9)
    elif spread < 100:
        close(y.double(), in_logarithms(q, k, v, omega, visible), 1e-3)


def test_state_over_large_jumps():
    """Chunks whose keys differ by hundreds of nats give the same result as one chunk."""
    n, d = 60, 4
    q, k, v = (tokens(1, 1, n, d, seed=s) for s in (1, 2, 3))
    k = k * torch.linspace(1, 60, n, dtype=torch.float64)[torch.randperm(n)].unsqueeze(-1)
    omega = draw(6, d)
    whole = in_logarithms(q, k, v, omega, torch.ones(n, n, dtype=torch.bool).tril())
    state, parts = None, []
    for start, stop in ((0, 1), (1, 20), (20, 21), (21, 60)):
        y, state = performer_causal(*(part[:, :, start:stop] for part in (q, k, v)), omega, state=state)
        parts.append(y)
    close(torch.cat(parts, 2), whole, 1e-9)


def test_features_are_orthogonal_with_lengths_of_normal_vectors():
    omega = draw(4096, 16)
    block = omega[:16]
    off = block @ block.t() - torch.diag(block.square().sum(1))
    assert off.abs().max() < 1e-12
    assert abs(omega.square().sum(1).mean() / 16 - 1) < 0.02
    assert omega.mean(0).abs().max() < 5 / 64  # a QR factor with LAPACK's signs is biased
    assert (omega.t() @ omega / 4096 - torch.eye(16)).abs().max() < 0.1
    assert draw(10, 16).shape == (10, 16)


def test_error_against_softmax_falls_with_the_features():
    """The error falls as the square root: sixteen times the features give about a quarter of it."""
    q, k, v = (scale * tokens(1, 1, 200, 8, seed=s) for s, scale in ((1, 0.3), (2, 0.3), (3, 1.0)))
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    errors = []
    for count in (16, 256, 4096):
        gaps = [(performer(q, k, v, draw(count, 8, seed)) - exact).norm() / exact.norm() for seed in range(8)]
        errors.append(sum(gaps) / 8)
    assert errors[1] < errors[0] / 3 and errors[2] < errors[1] / 3
    assert errors[2] < 0.02


@pytest.mark.slow
@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("kind", ["bf16", "autocast"])
def test_200_steps_in_bf16_with_large_logits(kind, causal):
    """Queries and keys start ten times too large; public implementations end in NaN here."""
    torch.manual_seed(0)
    mixer = polymix.create_mixer("performer", 16, heads=2)
    head = torch.nn.Linear(16, 16)
    with torch.no_grad():
        mixer.qkv.qkv.weight[:32] *= 10
    x = torch.randn(8, 40, 16)
    target = x.cumsum(1) / 7 if causal else x.mean(1, keepdim=True).expand_as(x) * 6
    model = torch.nn.ModuleList((mixer, head))
    if kind == "bf16":
        model, x, target = model.bfloat16(), x.bfloat16(), target.bfloat16()
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    losses = []
    for _ in range(200):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=kind == "autocast"):
            y = head(mixer(x, causal=causal))
        loss = (y.float() - target.float()).square().mean()
        loss.backward()
        assert loss.isfinite() and all(p.grad.isfinite().all() for p in model.parameters())
        optimizer.step()
        losses.append(loss.item())
    assert all(p.isfinite().all() for p in model.parameters())
    assert sum(losses[-10:]) < 0.8 * sum(losses[:10])


def test_redraws_continue_after_resuming():
    """A resumed run sees the same draws as an uninterrupted one; another seed sees different ones."""
    first, second = build("performer", 12), build("performer", 12)
    start = first.omega.clone()
    first.redraw()
    second.load_state_dict(first.state_dict())
    assert not torch.equal(first.omega, start)
    assert torch.equal(second.omega, first.omega)
    first.redraw()
    second.redraw()
    assert torch.equal(first.omega, second.omega) and int(first.draws) == 2
    other = build("performer", 12, seed=1)
    assert not torch.equal(other.omega, start)


def test_relu_features_are_positive_and_the_state_is_linear_attention_s():
    mixer = build("performer", 12, kernel="relu", heads=2, features=5)
    _, state = mixer.prefill(tokens(2, 9, 12))
    assert state.moments.shape == (2, 2, 5, 7)
    assert (state.moments[..., -1] > 0).all()


def test_widths_and_logits_of_a_trained_model():
    """d = 64 with logits of several hundred in float32: with a fixed stabiliser, all sums would be zero."""
    q, k, v = (8 * tokens(1, 1, 50, 64, seed=s).float() for s in (1, 2, 3))
    omega = draw(128, 64).float()
    y, _ = performer_causal(q, k, v, omega)
    assert y.isfinite().all() and (y.abs().amax(-1) > 1e-3).all()
    assert (q @ k.transpose(-1, -2)).abs().max() / math.sqrt(64) > 150
