"""Gated DeltaNet and Kimi Delta Attention: their equations token by token from `matrices()`, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F

from polymix.errors import CapabilityError, MaskError, OptionError
from tests.helpers import build, close, plus, tokens

FORMS = {
    "gated_delta": ("gated_delta", {"heads": 3}), "kda": ("kda", {"heads": 2}),
    "gated_delta-bare": ("gated_delta", {"heads": 2, "conv_kernel": 1, "gate": False}),
    "kda-bare": ("kda", {"heads": 1, "conv_kernel": 2, "gate": False}),
}  # fmt: skip


def make(key, **extra):
    name, options = FORMS[key]
    return build(name, 12, **options, **extra)


def expected(mixer, x):
    """One token after the other, with the memory S (B, heads, d, d)."""
    m, h, n = mixer.matrices(x.shape[1], dtype=torch.float64), mixer.heads, x.shape[1]
    qkv = torch.cat([plus(x @ m[f"W_{c}"], m[f"b_{c}"]) for c in "qkv"], -1)
    qkv = F.silu(torch.einsum("dmn,bnd->bmd", m["T"], qkv))
    q, k, v = (part.unflatten(-1, (h, -1)) for part in qkv.chunk(3, -1))
    q, k = (part / (part.square().sum(-1, keepdim=True) + 1e-6).sqrt() for part in (q, k))
    steps = x @ m["W_a"] if mixer.name == "gated_delta" else x @ m["W_a1"] @ m["W_a2"]
    decay = (-m["A"][:, None] * (1 + (steps + m["b_a"]).exp()).log().unflatten(-1, (h, -1))).exp()
    beta = (x @ m["W_beta"] + m["b_beta"]).sigmoid()[..., None, None]
    S, rows = torch.zeros(len(x), h, 12 // h, 12 // h, dtype=torch.float64), []
    eye = torch.eye(12 // h, dtype=torch.float64)
    for t in range(n):
        k_t = k[:, t, :, :, None]
        S = (eye - beta[:, t] * k_t @ k_t.mT) @ (decay[:, t, :, :, None] * S) + beta[:, t] * k_t @ v[:, t, :, None]
        rows.append((q[:, t, :, None] @ S)[:, :, 0] / (12 // h) ** 0.5)
    y = torch.stack(rows, 1)
    y = (y / (y.square().mean(-1, keepdim=True) + 1e-5).sqrt() * m["gain"]).flatten(-2)
    if mixer.config.gate:
        y = y * (
            F.silu(x @ m["W_g"]) if mixer.name == "gated_delta" else (x @ m["W_g1"] @ m["W_g2"] + m["b_g"]).sigmoid()
        )
    return plus(y @ m["W_o"], m["b_o"])


@pytest.mark.parametrize("key", list(FORMS))
@pytest.mark.parametrize("bias", [True, False])
def test_from_matrices(key, bias):
    for n in (1, 12, 37):
        mixer, x = make(key, bias=bias), tokens(2, n, 12)
        close(mixer(x), expected(mixer, x), 1e-11)


@pytest.mark.parametrize("key", list(FORMS))
def test_padding_anywhere_is_as_if_it_were_not_there(key):
    mixer, x, mask = make(key), tokens(2, 20, 12), torch.rand(2, 20, generator=torch.Generator().manual_seed(2)) > 0.4
    y = mixer(x.masked_fill(~mask[..., None], float("nan")), mask=mask)
    for b in range(2):
        close(y[b, mask[b]], expected(mixer, x[b : b + 1, mask[b]])[0], 1e-11)


@pytest.mark.parametrize("key", list(FORMS))
def test_gradients_through_states_and_padding(key):
    mixer, mask = make(key), torch.tensor([[True] * 7, [False, True, True, False, True, True, False]])

    def run(x):
        _, state = mixer.prefill(x[:, :4], mask=mask[:, :4])
        return mixer.prefill(x[:, 4:], state, mask=mask[:, 4:])[0]

    assert torch.autograd.gradcheck(run, (0.3 * tokens(2, 7, 12).requires_grad_(),), fast_mode=True)
    mixer(tokens(2, 20, 12)).square().sum().backward()
    assert all(p.grad is not None and p.grad.any() for p in mixer.parameters())


@pytest.mark.parametrize("name", ["gated_delta", "kda"])
def test_what_they_refuse(name):
    mixer, x = build(name, 12, heads=3), tokens(1, 5, 12)
    with pytest.raises(MaskError, match="bidirectional"):
        mixer(x, causal=False)
    with pytest.raises(CapabilityError, match="context"):
        mixer(x, tokens(1, 4, 12))
    for options in ({"conv_kernel": 0}, {"gate": 1}, {"heads": 5}):
        with pytest.raises(OptionError):
            build(name, 12, **options)
