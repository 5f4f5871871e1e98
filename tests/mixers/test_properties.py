"""Laws of single mixers that hold for any input: homogeneity, contextual mapping, blocks, chunks."""

from typing import NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import polymix
from polymix.errors import CapabilityError, MaskError, ShapeError, StateError
from polymix.mixers.states import StateSpec
from tests.contracts.mixer_cases import CASES
from tests.helpers import build, close, padre_from_matrices, tokens


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
    """Random inputs share no output row, even where they share the token (PoM, Lemma 3.3).

    Others do at every degree: tests/lens/test_views.py has a search that finds them.
    """
    mixer = build("pom", 8)
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
BLOCKWISE = {"floor": build("linear_floor", 8)} | {key: build("pom", 8, **options) for key, options in BLOCKS.items()}


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


@pytest.mark.parametrize("key", ["plain", "floor"])
def test_blocks_that_a_state_cannot_continue_are_refused(key):
    mixer, x = BLOCKWISE[key], tokens(2, 7, 8)
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


def test_a_state_that_counts_no_tokens_continues_blocks():
    """Every tuple has a method `count`, which is no number of tokens."""

    class Total(NamedTuple):
        total: torch.Tensor

    class Own(type(build("pom", 8))):
        def scan_blocks(self, x, state, mask, block):
            return x, Total(x.sum(1) if state is None else state.total + x.sum(1))

        def state_spec(self, batch):
            return StateSpec(Total, (batch, 8))

    mixer, x = Own(polymix.PomConfig(), 8), torch.ones(2, 3, 8)
    _, state = mixer.prefill(x, causal=2)
    assert mixer.prefill(x, state, causal=2)[1].total.unique().tolist() == [6.0]


@pytest.mark.parametrize("case", ["padre-causal", "pom", "pom-rotary", "qt", "qt-full", "local-rotary"])
def test_gradcheck_of_a_chunk_and_its_state(case):
    """The gradient flows through the state of an earlier chunk, with padding in both."""
    name, options = CASES[case]
    mixer = build(name, 6, **options)
    x = tokens(2, 7, 6).requires_grad_()
    mask = torch.tensor([[True] * 7, [False, True, True, False, True, True, False]])

    def run(x):
        _, state = mixer.prefill(x[:, :4], mask=mask[:, :4])
        return mixer.prefill(x[:, 4:], state, mask=mask[:, 4:])[0]

    assert torch.autograd.gradcheck(run, (x,), fast_mode=True)


def test_a_dropout_put_in_training_by_itself_drops():
    """As those do who draw samples from a trained model."""
    mixer, x = polymix.create_mixer("pom", 12, dropout=0.5).eval(), torch.randn(1, 7, 12)
    assert torch.equal(mixer(x), mixer(x))
    mixer.drop.train()
    assert not torch.equal(mixer(x), mixer(x))
