"""Laws of every mixer that hold for any input: the state law, padding, causality, permutation."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymix
from polymix.mixers import mixer_class
from tests.helpers import build, close, first_of_each, slow_but, tokens

RECURRENT = {
    "linear_floor": ("linear_floor", {}),
    "padre-2": ("padre", {"causal": True, "kernel_size": 4}),
    "padre-4-rms": ("padre", {"causal": True, "degree": 4, "normalize": "rms", "kernel_size": 3, "weight": "channel"}),
    "padre-full-heads": ("padre", {"causal": True, "degree": 3, "preset": "full", "heads": 2, "kernel_size": 2}),
    "padre-toeplitz": ("padre", {"causal": True, "degree": 3, "token": "toeplitz:length=5+mean"}),
    "padre-dilated": (
        "padre",
        {"causal": True, "token": "depthwise:kernel=3:dilation=2", "basis": "hermite", "denominator": 1},
    ),
    "pom": ("pom", {}),
    "pom-decay": ("pom", {"decay": 4}),
    "pom-sum": ("pom", {"reduction": "sum", "degree": 3}),
    "pom-rotary": ("pom", {"rotary": "1d", "selection_heads": 4}),
    "qt": ("qt", {"heads": 2}),
    "qt-full": ("qt", {"heads": 2, "form": "full"}),
    "qt-1": ("qt", {"heads": 1, "form": "full", "order": 1}),
    "non_local": ("non_local", {"form": "dot_product", "residual": True}),
    "linear": ("linear", {"heads": 2}),
    "linear-degree-3": ("linear", {"heads": 2, "feature_map": "identity", "normalize": False}),
    "hydra": ("hydra", {}),
    "performer": ("performer", {"heads": 2, "features": 5}),
    "performer-relu": ("performer", {"heads": 1, "kernel": "relu"}),
    "power": ("power", {"heads": 2}),
    "power-gate": ("power", {"heads": 2, "degree": 3, "normalize": False, "gate": True}),
    "hla": ("hla", {"heads": 2}),
    "mala": ("mala", {"heads": 2}),
    "mala-gate": ("mala", {"heads": 1, "gate": True}),
    "nala": ("nala", {"heads": 1}),
    "pola": ("pola", {"heads": 2}),
    "gated_delta": ("gated_delta", {"heads": 2}),
    "gated_delta-bare": ("gated_delta", {"heads": 1, "conv_kernel": 2, "gate": False}),
    "kda": ("kda", {"heads": 2, "conv_kernel": 3}),
    "hyena": ("hyena", {"filter": "explicit", "length": 4, "order": 3}),
    "hyena-fft": ("hyena", {"filter": "explicit", "length": 70}),
    "mamba": ("mamba", {"state_size": 4}),
    "local": ("local", {"window": 4}),
    "local-rotary": ("local", {"heads": 2, "window": 5, "rotary": 1e4}),
    "local-wide": ("local", {"heads": 2, "rotary": 1e4}),
}
QUICK = first_of_each(RECURRENT, "pom-decay")
MIXERS = {key: build(name, 8, **options) for key, (name, options) in RECURRENT.items()}


def run_in_pieces(mixer, x, cuts, mask=None):
    """Prefill piece by piece, single tokens by `step` where there is no mask."""
    out, state, start = [], None, 0
    for stop in [*cuts, x.shape[1]]:
        if stop == start:
            continue
        if stop - start == 1 and mask is None:
            y, state = mixer.step(x[:, start], state)
            y = y[:, None]
        else:
            y, state = mixer.prefill(x[:, start:stop], state, mask=None if mask is None else mask[:, start:stop])
        out.append(y)
        start = stop
    return torch.cat(out, 1), state


def leaves(state):
    for part in state:
        yield from leaves(part) if isinstance(part, tuple) else [part]


@pytest.mark.parametrize("key", slow_but(QUICK, MIXERS))
@given(n=st.integers(1, 24), data=st.data(), seed=st.integers(0, 999))
def test_state_law(key, n, data, seed):
    """Any split into prefills and steps equals one causal forward, and ends in the same state."""
    mixer, x = MIXERS[key], tokens(2, n, 8, seed=seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    y, state = run_in_pieces(mixer, x, cuts)
    close(y, mixer(x, causal=True), 1e-11)
    for ours, whole in zip(leaves(state), leaves(mixer.prefill(x)[1]), strict=True):
        close(ours.double(), whole.double(), 1e-11)


@pytest.mark.parametrize("key", slow_but(QUICK, MIXERS))
@given(data=st.data(), n=st.integers(1, 12), seed=st.integers(0, 999))
def test_padding_law(key, data, n, seed):
    """Padding at any place, in any split, changes neither a real token's output nor the state."""
    mixer = MIXERS[key]
    mask = torch.tensor(data.draw(st.lists(st.lists(st.booleans(), min_size=n, max_size=n), min_size=2, max_size=2)))
    x = tokens(2, n, 8, seed=seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=3)))
    y, state = run_in_pieces(mixer, x, cuts, mask)
    forward = mixer(x, causal=True, mask=mask)
    for b in range(2):
        keep = mask[b]
        if not keep.any():
            continue
        alone, end = mixer.prefill(x[b : b + 1, keep])
        close(y[b : b + 1, keep], alone, 1e-11)
        close(forward[b : b + 1, keep], alone, 1e-11)
        for ours, whole in zip(leaves(state), leaves(end), strict=True):
            close(ours[b : b + 1].double(), whole.double(), 1e-11)


@pytest.mark.parametrize("key", list(MIXERS))
def test_state_does_not_grow_and_is_wide(key):
    mixer = build(RECURRENT[key][0], 8, **RECURRENT[key][1]).to(torch.bfloat16)
    sizes = []
    for n in (3, 300):
        _, state = mixer.prefill(tokens(2, n, 8, dtype=torch.bfloat16))
        sizes.append([part.shape for part in leaves(state)])
        assert all(part.dtype in (torch.float32, torch.int64) for part in leaves(state)), "states are float32 at least"
    assert sizes[0] == sizes[1]


def test_every_recurrent_mixer_has_a_row():
    """And every one that sees no positions is permuted."""
    recurrent = {name for name in polymix.list_mixers() if mixer_class(name).capabilities.recurrent}
    assert recurrent <= {name for name, _ in RECURRENT.values()}


# A Fourier transform lets the future through by its rounding: tests/mixers/related/test_sequence.py bounds that.
ROUNDED = {"hyena-fft", "padre-toeplitz"}
CAUSAL = {key: case for key, case in RECURRENT.items() if key not in ROUNDED}
CAUSAL |= {"knn": ("knn", {"k": 3}), "softmax": ("softmax", {"heads": 2})}


@pytest.mark.parametrize("key", list(CAUSAL))
def test_causality_by_gradient(key):
    """No output depends on a later token."""
    name, options = CAUSAL[key]
    mixer = build(name, 8, **options)
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x, causal=True), tokens(1, 7, 8))
    reach = jacobian.abs().sum((0, 2, 3, 5))  # (output token, input token)
    assert not reach.triu(1).any()
    assert reach.diagonal().all()


PERMUTABLE = {
    "pom": {}, "qt": {"heads": 2}, "softmax": {}, "poly_nl": {"reduction": 2}, "poly_sa": {"positions": "mean"},
    "linear_floor": {},
    "non_local": {}, "se": {"add_maxpool": True}, "gc": {"rd_ratio": 0.5}, "prodpoly": {"degree": 3},
    "latent_gnn": {"latent": 4, "reduction": 2},
    "linear": {}, "efficient": {"heads": 2}, "hydra": {}, "sima": {}, "relu_linear": {"norm": None}, "xca": {"heads": 2},
    "performer": {}, "additive": {}, "power": {"heads": 2}, "hla": {},
    "mala": {}, "nala": {}, "pola": {}, "rala": {},
    "knn": {"k": 3, "metric": "euclidean", "aggregate": "max_relative"},
}  # fmt: skip


@pytest.mark.parametrize("name", list(PERMUTABLE))
@given(seed=st.integers(0, 999), n=st.integers(1, 20))
def test_permutation_equivariance(name, seed, n):
    """Mixers without positions: permuted tokens give permuted outputs (PoM, Proposition 3.1)."""
    mixer = build(name, 8, **PERMUTABLE[name])
    x = tokens(2, n, 8, seed=seed)
    order = torch.randperm(n, generator=torch.Generator().manual_seed(seed))
    close(mixer(x[:, order]), mixer(x)[:, order], 1e-11)
