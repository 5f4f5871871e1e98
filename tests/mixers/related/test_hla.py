"""Second-order higher-order linear attention against the paper's own recurrence, and what it refuses."""

import pytest
import torch

from polymix.errors import CapabilityError
from polymix.ops.related.hla import hla_causal
from tests.helpers import build, close, tokens


def test_the_masked_form_is_the_paper_s():
    """q_t (S_t C_t - G_t) with S = Σ k kᵀ, C = Σ q vᵀ and G_t = G_{t-1} + k_t (k_tᵀ C_{t-1}), token by token."""
    q, k, v = tokens(3, 2, 3, 150, 4)
    S, C, G = (torch.zeros(2, 3, 4, 4, dtype=torch.float64) for _ in "SCG")
    rows = []
    for t in range(150):
        q_t, k_t, v_t = (part[:, :, t, :, None] for part in (q, k, v))
        G = G + k_t @ (k_t.mT @ C)
        S, C = S + k_t @ k_t.mT, C + q_t @ v_t.mT
        rows.append((q_t.mT @ (S @ C - G))[:, :, 0])
    y, state = hla_causal(q, k, v)
    count = torch.arange(1, 151, dtype=torch.float64)[:, None]
    close(y, torch.stack(rows, 2) / 4 / (count * (count + 1) / 2), 1e-12)
    close(state.keys, S, 1e-10)
    close(state.moments, (S @ C - G) / 2, 1e-9)


def test_the_last_token_of_the_masked_form_is_not_that_of_all_pairs():
    """The mask is inside the second product too: a query of the past sees its own past alone."""
    mixer, x = build("hla", 12, heads=3), tokens(1, 9, 12)
    assert (mixer(x, causal=True)[:, -1] - mixer(x)[:, -1]).abs().max() > 0.01
    close(mixer(x[:, :1], causal=True), mixer(x[:, :1]), 1e-12)


def test_hla_takes_no_context():
    with pytest.raises(CapabilityError, match="context"):
        build("hla", 12, heads=3)(tokens(1, 5, 12), tokens(1, 4, 12))
