"""Each mechanism of the linear-attention family equals its equation: padding, causality, contexts, states."""

import pytest
import torch

from polymix.errors import StateError
from tests.helpers import close, tokens
from tests.mixers.related.attention import CAUSAL, CROSS, FORMS, MASKED, PAD, TOL, expected, join, make, project


@pytest.mark.parametrize("key", list(FORMS))
@pytest.mark.parametrize("bias", [True, False])
def test_from_matrices(key, bias):
    mixer, x = make(key, bias=bias), tokens(2, 12, 12)
    if mixer.config.to_dict().get("norm") == "batch":
        mixer.train()(tokens(2, 12, 12, seed=4))  # statistics of its own
        mixer.eval()
    close(mixer(x), expected(mixer, x), TOL)


@pytest.mark.parametrize("key", MASKED)
def test_padding(key):
    """Padding takes no part, whatever it holds: real tokens get what the equation over the real tokens says."""
    mixer, x, mask = make(key), tokens(3, 12, 12), PAD
    if mixer.config.to_dict().get("num_prefix_tokens") or key == "sima-class":
        mask = mask.clone()
        mask[:, :2] = True
    y = expected(mixer, x, mask=mask)
    for value in (0.0, 1e12, float("inf"), float("nan")):
        close(mixer(x.masked_fill(~mask[..., None], value), mask=mask)[mask], y[mask], 1e-10)


@pytest.mark.parametrize("key", [key for key in MASKED if "focused" not in key and "scales" not in key and "prefix" not in key
                                 and key != "sima-class"])  # fmt: skip
def test_padding_is_as_if_it_were_not_there(key):
    """Where no grid gives padding a place, a row equals its real tokens alone."""
    mixer, x = make(key), tokens(3, 12, 12)
    y = mixer(x, mask=PAD)
    for b in range(3):
        close(y[b, PAD[b]], mixer(x[b : b + 1, PAD[b]])[0], 1e-11)


@pytest.mark.parametrize("key", MASKED)
def test_a_row_of_padding_alone_is_zero_in_the_mixed_part(key):
    mixer, x, mask = make(key), tokens(2, 12, 12), torch.tensor([[True] * 12, [False] * 12])
    y = mixer(x, mask=mask)
    close(y[0], mixer(x[:1])[0], 1e-11)
    close(y[1], expected(mixer, x[1:], mask=mask[1:])[0], 1e-11)
    if mixer.name not in ("focused", "relu_linear", "sima", "additive"):  # a bias or a norm, or what passes through
        close(y[1], mixer.matrices(12)["b_o"].expand(12, 12), 1e-11)


@pytest.mark.parametrize("key", CAUSAL)
@pytest.mark.parametrize("n", [1, 15, 16, 17, 130, 300])
@pytest.mark.parametrize("mask", [False, True])
def test_causal(key, n, mask):
    """Over several chunks, and for the Performer over groups of blocks, with padding anywhere."""
    mixer, x = make(key), tokens(2, n, 12)
    see = (
        {"causal": 1, "mask": torch.rand(2, n, generator=torch.Generator().manual_seed(5)) > 0.3}
        if mask
        else {"causal": 1}
    )
    real = see.get("mask", torch.ones(2, n, dtype=torch.bool))
    y = mixer(x, causal=True, mask=see.get("mask"))
    if real.any():
        close(y[real], expected(mixer, x, **see)[real], 1e-11)
    state, parts = None, []
    for piece, its in zip(x.split(37, 1), real.split(37, 1), strict=True):
        part, state = mixer.prefill(piece, state, mask=its)
        parts.append(part)
    close(torch.cat(parts, 1)[real], y[real], 1e-11)


@pytest.mark.parametrize("key", CROSS)
@pytest.mark.parametrize("mask", [False, True])
def test_cross(key, mask):
    mixer, x, context = make(key), tokens(3, 5, 12), tokens(3, 12, 12, seed=1)
    see = {"mask": PAD} if mask else {}
    close(mixer(x, context, **see), expected(mixer, x, context, **see), 1e-11)


@pytest.mark.parametrize("key", CAUSAL)
def test_a_huge_or_broken_future_token_does_not_move_the_past(key):
    mixer = make(key).float()
    x = tokens(1, 300, 12, dtype=torch.float32)
    for value in (1e3, float("nan")):
        loud = x.clone()
        loud[:, 280] *= value
        assert torch.equal(mixer(loud, causal=True)[:, :256], mixer(x, causal=True)[:, :256])


@pytest.mark.parametrize("key", CAUSAL)
def test_states(key):
    """A state owns no more than it shows, carries the gradient, and one that does not fit is named."""
    mixer, x = make(key), tokens(2, 40, 12)
    _, state = mixer.prefill(x)
    assert all(part.untyped_storage().nbytes() == part.numel() * part.element_size() for part in state)
    for wrong in (tuple(state), type(state)(*(part[..., :1] for part in state)), (1, 2), "state"):
        with pytest.raises(StateError):
            mixer.prefill(x, wrong)

    def run(x):
        mask = torch.tensor([[True] * 7, [False, True, True, False, True, True, False]])
        _, state = mixer.prefill(x[:, :4], mask=mask[:, :4])
        return mixer.prefill(x[:, 4:], state, mask=mask[:, 4:])[0]

    assert torch.autograd.gradcheck(run, (0.3 * tokens(2, 7, 12).requires_grad_(),), fast_mode=True)


def test_norms_of_sima_freeze_it_to_a_polynomial():
    """With q and k divided by the norms of one input, the mixer there is Q̂ (K̂ᵀ V)."""
    mixer, x = make("sima"), tokens(2, 12, 12)
    q_norm, k_norm = mixer.norms(x)
    assert q_norm.shape == k_norm.shape == (2, 12)
    m = mixer.matrices(12, dtype=torch.float64)
    q, k, v = (part.transpose(1, 2).flatten(-2) for part in project(m, x, x, mixer.heads))
    q, k = ((t / norm[:, None]).unflatten(-1, (3, 4)).transpose(1, 2) for t, norm in ((q, q_norm), (k, k_norm)))
    close(mixer(x), join(m, q @ (k.transpose(-1, -2) @ v.unflatten(-1, (3, 4)).transpose(1, 2))), TOL)
