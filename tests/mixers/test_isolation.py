"""What single mixers promise of tokens that must not show, of states, types and graphs."""

import copy
from pathlib import Path

import pytest
import torch

import polymix
from polymix.ops.qt import GUARD, qt_attention
from tests.helpers import build, close, slow_but, tokens
from tests.mixers.compiled import graphs


@pytest.mark.parametrize(("form", "heads"), [("compact", 1), ("full", 2)])
def test_a_huge_future_token_does_not_move_the_past_of_qt(form, heads):
    """Sums before a chunk are never differences: in float32 those would lose the past to the future's size."""
    mixer = build("qt", 16, form=form, heads=heads).float()
    x = tokens(1, 300, 16, dtype=torch.float32)
    loud = x.clone()
    loud[:, 280] *= 1e3
    assert torch.equal(mixer(loud, causal=True)[:, :256], mixer(x, causal=True)[:, :256])
    loud[:, 280] = float("nan")
    assert torch.equal(mixer(loud, causal=True)[:, :256], mixer(x, causal=True)[:, :256])


@pytest.mark.parametrize("causal", [None, True, 3])
@pytest.mark.parametrize("value", [1e12, float("inf"), float("nan")])
def test_segments_are_isolated(causal, value):
    mixer = build("pom", 8).float()
    x = tokens(1, 12, 8, dtype=torch.float32)
    ids = torch.tensor([[0] * 5 + [1] * 4 + [2] * 3])
    loud = x.clone()
    loud[:, 2] = value
    options = {} if causal is None else {"causal": causal}
    assert torch.equal(mixer(loud, segments=ids, **options)[:, 5:], mixer(x, segments=ids, **options)[:, 5:])
    asked, told = ids[:, 5:], ids
    ask = x[:, 5:]
    assert torch.equal(mixer(ask, loud, segments=(asked, told)), mixer(ask, x, segments=(asked, told)))


def test_whatever_padding_holds_stays_beside_a_prefix():
    mixer = build("padre", 8, grid=(3, 4), num_prefix_tokens=1)
    x, mask = tokens(2, 13, 8), torch.ones(2, 13, dtype=torch.bool)
    mask[0, -3:] = mask[1, -5:] = False
    broken = x.masked_fill(~mask[..., None], float("nan"))
    close(mixer(broken, mask=mask)[mask], mixer(x, mask=mask)[mask], 1e-12)


@pytest.mark.parametrize(
    ("name", "options"),
    [("padre", {"causal": True}), ("pom", {}), ("pom", {"rotary": "1d"}), ("qt", {}), ("local", {"window": 4})],
)
def test_a_state_owns_no_more_than_it_shows(name, options):
    """A view would keep every token of the chunk alive."""
    _, state = build(name, 8, **options).prefill(tokens(2, 500, 8))
    for part in state.windows if name == "padre" else state:
        assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_prefill_takes_padding_masks_alone():
    with pytest.raises(polymix.errors.MaskError, match="prefill is causal"):
        build("pom", 8).prefill(tokens(3, 3, 8), mask=torch.ones(3, 3, 3, dtype=torch.bool))


def test_prefix_mean_is_summed_wide():
    mixer = polymix.create_mixer("padre", 8, num_prefix_tokens=1, kernel_size=3, dtype=torch.float16)
    assert mixer(torch.full((1, 16385, 8), 8.0, dtype=torch.float16)).isfinite().all()


@pytest.mark.parametrize(
    ("name", "options"),
    [("padre", {"grid": (3, 4)}), ("padre", {}), ("poly_sa", {"grid": (3, 4), "head_mixing": "depthwise"})],
)
def test_an_empty_batch_has_gradients(name, options):
    mixer = build(name, 8, **options)
    mixer(tokens(0, 12, 8)).sum().backward()
    assert all(not p.grad.any() for p in mixer.parameters())


def test_the_guard_of_qt_binds_in_its_own_type():
    """q·k negative enough that 1 + s < 0: the denominator is GUARD times the tokens seen, exactly so in float64."""
    q, k = torch.full((1, 1, 1, 4), 2.0, dtype=torch.float64), torch.full((1, 1, 2, 4), -2.0, dtype=torch.float64)
    v = torch.ones(1, 1, 2, 4, dtype=torch.float64)
    y = qt_attention(q, k, v, form="full", order=1)
    close(y, torch.full_like(y, 2 * (1 - 8) / (2 * GUARD)), 1e-13)


def test_compact_similarity_is_a_sum_of_squares_while_beta_allows():
    """α² t² + 2β² t/√d + γ²/d ≥ 0 for each product t = q_i k_i while β² ≤ |αγ|: the guard then never binds."""
    from polymix.ops.qt.eager import taylor_features

    q, k = tokens(1, 1, 50, 6), tokens(1, 1, 50, 6, seed=1)
    scale = torch.tensor([0.7, (0.7 * 1.3) ** 0.5, 1.3], dtype=torch.float64).view(3, 1, 1, 1)
    similarity = taylor_features(q, "compact", 2, scale) @ taylor_features(k, "compact", 2, scale).transpose(-1, -2)
    assert similarity.min() >= -1e-12
    worst = -(6**-0.5) * scale[1, 0, 0, 0] ** 2 / scale[0, 0, 0, 0] ** 2  # the t at which every square vanishes
    q = torch.ones(1, 1, 1, 6, dtype=torch.float64)
    touch = taylor_features(q, "compact", 2, scale) @ taylor_features(worst * q, "compact", 2, scale).transpose(-1, -2)
    assert abs(touch.item()) < 1e-12


COMPILED = [
    ("pom", {}, {"causal": True, "mask": True}), ("qt", {}, {"causal": True}), ("padre", {"causal": True}, {"mask": True}),
    ("pom", {}, {"mask": True}), ("pom", {}, {"causal": 3}), ("qt", {}, {"mask": True}), ("padre", {}, {"mask": True}),
    ("softmax", {}, {"causal": 3}), ("softmax", {}, {"mask": True}), ("poly_nl", {}, {"mask": True}),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "call"), slow_but(COMPILED[:1], COMPILED))
def test_compile_with_masks_and_any_length(name, options, call):
    calls = []
    # qt in its causal form compiles twice at most: for one chunk of 128 tokens, and for more.
    for n in (150, 300, 270) if name == "qt" and "causal" in call else (13, 150, 40):
        mask = {"mask": torch.arange(n).expand(2, n) < n - 3} if "mask" in call else {}
        calls.append((tokens(2, n, 12, dtype=torch.float32), {**call, **mask}))
    count = graphs(build(name, 12, **options).float(), calls)
    assert len(set(count)) == 1, "a new length must not compile again"


def test_qt_error_falls_with_the_order_and_grows_with_the_logits(monkeypatch):
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "benchmarks")  # where a script finds the files beside it
    from qt_error import error

    for spread in (0.125, 0.5):
        assert error(0, spread) > error(1, spread) > error(2, spread)
    assert error(2, 0.125) < 0.01
    assert error(2, 2.0) > error(2, 0.5)


def test_block_dropout_reaches_both_halves():
    block = polymix.PolyMorpher(8, dropout=0.5)
    assert block.mixer.drop.p == 0.5
    assert block.mlp[2].p == 0.5
    copy.deepcopy(block)


def test_polymorpher_without_norm_is_the_equation_as_printed():
    """P(X) = X + PoM(X) + FF(X + PoM(X)), PoM Eq. 3."""
    block = polymix.PolyMorpher(8, norm=None, degree=3, expand=1, dtype=torch.float64)
    x = tokens(2, 7, 8)
    inner = x + block.mixer(x)
    close(block(x), inner + block.mlp(inner), 1e-12)
