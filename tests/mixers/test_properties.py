"""Laws that must hold for any input: the state law, padding, causality, permutation, homogeneity."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymix
from polymix.errors import CapabilityError, MaskError, ShapeError, StateError
from tests.helpers import build, close, padre_from_matrices, tokens

RECURRENT = {
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
    "hyena": ("hyena", {"filter": "explicit", "length": 4, "order": 3}),
    "hyena-fft": ("hyena", {"filter": "explicit", "length": 70}),
    "mamba": ("mamba", {"state_size": 4}),
    "local": ("local", {"window": 4}),
    "local-rotary": ("local", {"heads": 2, "window": 5, "rotary": 1e4}),
    "local-wide": ("local", {"heads": 2, "rotary": 1e4}),
}
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


@pytest.mark.parametrize("key", list(MIXERS))
@given(n=st.integers(1, 24), data=st.data(), seed=st.integers(0, 999))
def test_state_law(key, n, data, seed):
    """Any split into prefills and steps equals one causal forward, and ends in the same state."""
    mixer, x = MIXERS[key], tokens(2, n, 8, seed=seed)
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=6)))
    y, state = run_in_pieces(mixer, x, cuts)
    close(y, mixer(x, causal=True), 1e-11)
    for ours, whole in zip(leaves(state), leaves(mixer.prefill(x)[1]), strict=True):
        close(ours.double(), whole.double(), 1e-11)


@pytest.mark.parametrize("key", list(MIXERS))
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


@pytest.mark.parametrize("name", ["pom", "qt", "softmax"])
@pytest.mark.parametrize("causal", [2, 3])
def test_block_causality_by_gradient(name, causal):
    if name == "qt":
        with pytest.raises(polymix.errors.CapabilityError, match="pom, softmax"):
            build(name, 8)(tokens(1, 7, 8), causal=causal)
        return
    mixer = build(name, 8)
    jacobian = torch.autograd.functional.jacobian(lambda x: mixer(x, causal=causal), tokens(1, 7, 8))
    reach = jacobian.abs().sum((0, 2, 3, 5)) > 0
    block = torch.arange(7) // causal
    assert torch.equal(reach, block[None, :] <= block[:, None])


PERMUTABLE = {
    "pom": {}, "qt": {"heads": 2}, "softmax": {}, "poly_nl": {"reduction": 2}, "poly_sa": {"positions": "mean"},
    "linear_floor": {},
    "non_local": {}, "se": {"add_maxpool": True}, "gc": {"rd_ratio": 0.5}, "prodpoly": {"degree": 3},
    "latent_gnn": {"latent": 4, "reduction": 2},
    "linear": {}, "efficient": {"heads": 2}, "hydra": {}, "sima": {}, "relu_linear": {"norm": None}, "xca": {"heads": 2},
    "performer": {}, "additive": {},
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


@given(degree=st.integers(1, 8), t=st.floats(-2, 2), seed=st.integers(0, 999))
def test_lemma_1_homogeneity(degree, t, seed):
    """Z_i(tX) = tⁱ Z_i(X) without biases."""
    mixer = build("padre", 4, degree=degree, preset="full", grid=(3, 2), kernel_size=3, bias=False)
    x = tokens(1, 6, 4, seed=seed)
    scaled, plain = padre_from_matrices(mixer, t * x, degrees=True), padre_from_matrices(mixer, x, degrees=True)
    for i, (zt, z) in enumerate(zip(scaled, plain, strict=True), start=1):
        assert torch.allclose(zt, t**i * z, rtol=1e-9, atol=1e-9 * z.abs().max().item())


@pytest.mark.parametrize("degree", range(1, 9))
def test_padre_of_one_term_is_homogeneous(degree):
    """The module itself, not its matrices: one term of degree d scales as t^d."""
    mixer = build("padre", 4, degree=degree, terms=(degree,), grid=(3, 2), kernel_size=3, bias=False)
    x = tokens(1, 6, 4)
    close(mixer(1.7 * x), 1.7**degree * mixer(x), 1e-11)


@given(seed=st.integers(0, 9999))
def test_pom_is_a_contextual_mapping(seed):
    """Two different inputs never share an output row, even where they share the token (PoM, Lemma 3.3)."""
    mixer = MIXERS["pom"]
    a, b = tokens(1, 5, 8, seed=seed), tokens(1, 5, 8, seed=seed)
    b[:, 4] += 0.5  # one token differs; rows 0-3 are the same tokens in another context
    rows = torch.cat((mixer(a)[0], mixer(b)[0]))
    gap = torch.cdist(rows, rows) + torch.eye(10, dtype=torch.float64)
    assert gap.min() > 1e-9


def test_pom_rotary_is_relative():
    """The sum over a rotated pair depends on the distance of query and context alone."""
    from polymix.ops.shared.rotary import rotary, rotate

    s, h = tokens(1, 8), tokens(1, 8, seed=1)

    def score(i, j):
        turned = [rotate(v, rotary(torch.tensor([p]), 8, axes=1, heads=None), axes=1) for v, p in ((s, i), (h, j))]
        product = turned[0] * turned[1]
        return product[0, :4] + product[0, 4:]

    close(score(3, 10), score(1_000_003, 1_000_010), 1e-9)


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("name", ["pom", "softmax", "qt"])
def test_rows_that_see_nothing_are_zero_in_the_mixed_part(name, reduction):
    if name != "pom" and reduction == "sum":
        return
    mixer = build(name, 8, **({"reduction": reduction} if name == "pom" else {}))
    x = tokens(2, 5, 8)
    mask = torch.tensor([[True] * 5, [False] * 5])
    y = mixer(x, mask=mask)
    close(y[1], mixer.matrices(5)["b_o"].expand(5, 8), 1e-12)
    assert torch.autograd.grad(y.sum(), mixer.proj.weight)[0].isfinite().all()


def test_crossover_as_printed():
    """PoM, Eq. 11: n ≥ d + 3 at E = 2d, k = 2."""
    assert polymix.create_mixer("pom", 512).crossover() == 512 + 3


BLOCKS = {
    "plain": {}, "sum": {"reduction": "sum", "degree": 3}, "rotary": {"rotary": "1d", "selection_heads": 4},
    "groups": {"groups": 2},
}  # fmt: skip
BLOCKWISE = {key: build("pom", 8, **options) for key, options in BLOCKS.items()}


@pytest.mark.parametrize("key", list(BLOCKWISE))
@given(block=st.integers(2, 4), data=st.data(), seed=st.integers(0, 999))
def test_state_law_of_blocks(key, block, data, seed):
    """Chunks of whole blocks, and single blocks by `step`, equal one block-causal forward (PoM, Eq. 7)."""
    mixer, count = BLOCKWISE[key], data.draw(st.integers(1, 6))
    n = count * block - data.draw(st.integers(0, block - 1))  # the last block may be shorter
    x, out, state, start = tokens(2, n, 8, seed=seed), [], None, 0
    for stop in [*sorted(data.draw(st.lists(st.integers(0, count - 1), max_size=3))), count]:
        part = x[:, start * block : stop * block]
        if part.shape[1] == block and data.draw(st.booleans()):
            y, state = mixer.step(part, state, causal=block)
        elif part.shape[1]:
            y, state = mixer.prefill(part, state, causal=block)
        else:
            continue
        out.append(y)
        start = stop
    close(torch.cat(out, 1), mixer(x, causal=block), 1e-11)
    for ours, whole in zip(state, mixer.prefill(x)[1], strict=True):
        close(ours.double(), whole.double(), 1e-11)


@pytest.mark.parametrize("key", list(BLOCKWISE))
@pytest.mark.parametrize("pad", ["left", "right", "within"])
def test_padding_law_of_blocks(key, pad):
    """Blocks count real tokens, in a first chunk and in a later one."""
    mixer, x = BLOCKWISE[key], tokens(2, 14, 8)
    mask = torch.ones(2, 7, dtype=torch.bool)
    mask[:, {"left": 0, "right": 6, "within": 3}[pad]] = False
    both = torch.cat((mask, mask), dim=1)
    first, state = mixer.prefill(x[:, :7], causal=3, mask=mask)
    second, _ = mixer.prefill(x[:, 7:], state, causal=3, mask=mask)
    close(torch.cat((first, second), 1)[both], mixer(x, causal=3, mask=both)[both], 1e-11)


def test_blocks_that_a_state_cannot_continue_are_refused():
    mixer, x = BLOCKWISE["plain"], tokens(2, 7, 8)
    _, state = mixer.prefill(x, causal=3)
    with pytest.raises(StateError, match="within a block of 3"):
        mixer.prefill(x, state, causal=3)
    mixer.prefill(x, state, causal=7)  # a multiple of seven
    mixer.prefill(x, state)  # token by token from here
    for wrong in (x[:, :1], x[:, 0], x[:, :4]):
        with pytest.raises(ShapeError, match=r"one block, \(B, 3, 8\)"):
            mixer.step(wrong, causal=3)
    for causal in (False, 0, None, 1.5, "3"):
        with pytest.raises(MaskError, match="causal"):
            mixer.prefill(x, causal=causal)
    for other in (build("qt", 8, heads=2), build("pom", 8, decay=4), build("mamba", 8)):
        with pytest.raises((CapabilityError, MaskError), match="causal"):
            other.prefill(x, causal=3)
