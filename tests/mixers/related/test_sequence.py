"""Hyena, Mamba, Conv2Former and k-NN mixing recomputed from their equations, with N × N objects and loops."""

import math

import pytest
import torch
import torch.nn.functional as F

import polymix
from polymix.errors import CapabilityError, MissingExtraError, OptionError, ShapeError, StateError
from tests.helpers import build, close, tokens, visible


def affine(x, weight, bias):
    return x @ weight if bias is None else x @ weight + bias


def over_tokens(maps, x, bias):
    """(C, N, N) applied to (B, N, C), channel by channel."""
    y = torch.einsum("cnm,bmc->bnc", maps, x)
    return y if bias is None else y + bias


def hyena_by_equation(mixer, x):
    m = mixer.matrices(x.shape[1])
    u = over_tokens(m["T"], affine(x, m["W_in"], m["b_in"]), m["b_short"])
    *gates, v = u.chunk(mixer.config.order + 1, dim=-1)
    for s in range(1, mixer.config.order):
        v = over_tokens(m["H"][s - 1], v * gates[mixer.config.order - s], None)
    return affine(v * gates[0], m["W_out"], m["b_out"])


HYENAS = [
    {"length": 32}, {"length": 17, "order": 4, "emb_dim": 7, "shift": 0.1, "decay": (0.0, 40.0)},
    {"length": 20, "order": 3, "filter_depth": 0, "kernel_size": 1, "bias": False, "frequency": 5},
    {"filter": "explicit", "length": 1}, {"filter": "explicit", "length": 7, "order": 3, "bias": False},
    {"filter": "explicit", "length": 90}, {"filter": "explicit", "length": 65, "order": 4, "kernel_size": 5},
]  # fmt: skip


@pytest.mark.parametrize("options", HYENAS)
def test_hyena_by_its_equation(options):
    """Toeplitz matrices of all filters, their skip on the diagonal."""
    mixer, x = build("hyena", 6, **options), tokens(2, 17, 6)
    close(mixer(x), hyena_by_equation(mixer, x), 1e-12)
    real = torch.tensor([[i % 3 != 1 for i in range(17)], [False] * 6 + [True] * 11])
    y = mixer(x.masked_fill(~real[..., None], torch.nan), mask=real)
    for b in range(2):
        close(y[b, real[b]], hyena_by_equation(mixer, x[b : b + 1, real[b]])[0], 1e-12)
    zeros = torch.zeros(int((~real).sum()), 6, dtype=torch.float64)
    bias = mixer.matrices(1)["b_out"]
    close(y[~real], zeros if bias is None else zeros + bias, 1e-12)


def test_hyena_taps_by_the_definition():
    """The network, the decay and the interleaving of channels and steps, tap by tap."""
    mixer = build("hyena", 3, length=9, order=3, filter_width=5, emb_dim=5, shift=0.2)
    made = mixer.filter
    for t in range(9):
        h = made.z[t]
        for layer in made.layers:
            h = torch.sin(made.frequency * (layer.weight @ h + layer.bias))
        h = made.last.weight @ h
        for c in range(3):
            for s in range(2):
                rate = made.deltas[c * 2 + s].abs()
                expected = h[c * 2 + s] * (math.exp(-rate * t / 8) + 0.2)
                close(made(9)[s, c, t], expected, 1e-12)
    assert mixer.filter.deltas[0].item() == pytest.approx(math.log(100) / 1.5)
    assert mixer.filter.deltas[-1].item() == pytest.approx(math.log(100) / 0.3)


def test_hyena_positions_at_init():
    z = polymix.create_mixer("hyena", 4, length=10, emb_dim=7, dtype=torch.float64).filter.z
    for t in range(10):
        f = [1e-4, (2 + 1e-4) / 2, 2.0]
        angle = [2 * math.pi * t / 10 * each for each in f]
        expected = [t / 9, *map(math.cos, angle), *[-math.sin(a) for a in angle]]
        close(z[t].detach(), torch.tensor(expected, dtype=torch.float64), 1e-12)


def test_a_longer_sequence_is_refused_not_cut():
    mixer = build("hyena", 6, length=10)
    mixer(tokens(1, 10, 6))
    with pytest.raises(ShapeError, match="at most length=10"):
        mixer(tokens(1, 11, 6))
    build("hyena", 6, length=10, filter="explicit")(tokens(1, 300, 6))


def test_implicit_hyena_is_not_recurrent():
    with pytest.raises(CapabilityError):
        build("hyena", 6, length=10).prefill(tokens(1, 3, 6))


@pytest.mark.parametrize("options", [{"length": 64}, {"filter": "explicit", "length": 70}])
def test_the_future_reaches_a_transform_by_rounding_alone(options):
    """In float64 to 1e-14 of the largest entry of the Jacobian."""
    mixer = build("hyena", 4, **options)
    jacobian = torch.autograd.functional.jacobian(mixer, tokens(1, 40, 4)).abs().amax((0, 2, 3, 5))
    assert jacobian.triu(1).max() < 1e-14 * jacobian.max()
    assert jacobian.diagonal().all()


@pytest.mark.parametrize("order", [2, 3, 4])
@pytest.mark.parametrize("filter", ["implicit", "explicit"])
def test_hyena_is_homogeneous_of_degree_order_plus_one(order, filter):
    mixer, x = build("hyena", 5, order=order, filter=filter, length=20, bias=False), tokens(1, 20, 5)
    close(mixer(1.7 * x), 1.7 ** (order + 1) * mixer(x), 1e-11)
    assert mixer.polynomial == build("hyena", 5, order=order, bias=False).polynomial
    assert mixer.polynomial.degree == order + 1
    assert mixer.polynomial.homogeneous
    assert not build("hyena", 5, order=order).polynomial.homogeneous


@pytest.mark.parametrize("options", [
    {"order": 1}, {"filter": "both"}, {"length": 0}, {"kernel_size": 0}, {"emb_dim": 4}, {"emb_dim": 1},
    {"filter_depth": -1}, {"decay": 3}, {"decay": (-1, 2)}, {"filter_width": 0}, {"frequency": "fast"},
    {"filter": "explicit", "shift": 0.1}, {"filter": "explicit", "emb_dim": 5},
])  # fmt: skip
def test_hyena_options(options):
    with pytest.raises(OptionError, match=next(reversed(options))):
        polymix.create_mixer("hyena", 6, **options)


def mamba_scan(m, u):
    """One direction of Mamba's scan by its matrices, token by token; also Δ."""
    u = F.silu(over_tokens(m["T"], u, m["b_conv"]))
    steps = F.softplus(u @ m["W_Delta1"] @ m["W_Delta2"] + m["b_Delta"])
    B, C = u @ m["W_B"], u @ m["W_C"]
    h, rows = 0, []
    for t in range(u.shape[1]):
        h = torch.exp(steps[:, t, :, None] * m["A"]) * h + (steps[:, t] * u[:, t])[..., None] * B[:, t, None]
        rows.append((h @ C[:, t, :, None])[..., 0] + m["D"] * u[:, t])
    return torch.stack(rows, 1), steps


def mamba_by_equation(mixer, x):
    """Token by token; also Δ."""
    m = mixer.matrices(x.shape[1])
    u, z = affine(x, m["W_in"], m["b_in"]).chunk(2, dim=-1)
    y, steps = mamba_scan(m, u)
    return affine(y * F.silu(z), m["W_out"], m["b_out"]), steps


MAMBAS = [{}, {"bias": False}, {"state_size": 1, "conv_kernel": 1, "expand": 0.5, "time_step_rank": 3}]


@pytest.mark.parametrize("options", MAMBAS)
def test_mamba_by_its_equation(options):
    mixer, x = build("mamba", 6, **options), tokens(2, 37, 6)
    y, steps = mamba_by_equation(mixer, x)
    close(mixer(x), y, 1e-12)
    close(mixer.time_steps(x), steps, 1e-12)
    real = torch.tensor([[i % 3 != 1 for i in range(37)], [False] * 20 + [True] * 17])
    masked = mixer(x.masked_fill(~real[..., None], torch.nan), mask=real)
    for b in range(2):
        close(masked[b, real[b]], mamba_by_equation(mixer, x[b : b + 1, real[b]])[0][0], 1e-12)


def test_mamba_time_steps_at_init():
    """Between dt_min and dt_max where the input says nothing."""
    mixer = polymix.create_mixer("mamba", 64, dt_min=0.02, dt_max=0.05)
    steps = F.softplus(mixer.matrices(1)["b_Delta"])
    assert (steps > 0.0199).all()
    assert (steps < 0.0501).all()
    assert steps.std() > 0.005


def test_mamba_gradients_are_finite_whatever_padding_holds():
    for name, options in (
        ("mamba", {}),
        ("hyena", {"length": 16}),
        ("conv2former", {"grid": (3, 3)}),
        ("knn", {"k": 2}),
    ):
        mixer, x = build(name, 6, **options), tokens(2, 9, 6)
        real = torch.tensor([[True] * 4 + [False] * 5, [False] * 9])
        y = mixer(x.masked_fill(~real[..., None], torch.nan), mask=real)
        y[real].sum().backward()
        assert y.isfinite().all(), name
        assert all(p.grad is None or p.grad.isfinite().all() for p in mixer.parameters()), name


@pytest.mark.parametrize(("options", "argument"), [
    ({"state_size": 0}, "state_size"), ({"conv_kernel": 0}, "conv_kernel"), ({"expand": 0}, "expand"),
    ({"expand": 1.1}, "expand"), ({"time_step_rank": 0}, "time_step_rank"), ({"dt_min": 1.0}, "dt_min"),
    ({"dt_max": 0}, "dt_max"),
])  # fmt: skip
def test_mamba_options(options, argument):
    with pytest.raises(OptionError, match=argument):
        polymix.create_mixer("mamba", 6, **options)


def test_mamba_says_which_extra_it_needs(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "transformers.models.mamba.modeling_mamba", None)
    with pytest.raises(MissingExtraError, match=r"\.\[text\]"):
        polymix.create_mixer("mamba", 6)


@pytest.mark.parametrize(("name", "options"), [("mamba", {}), ("hyena", {"filter": "explicit", "length": 4})])
def test_a_state_of_another_mixer_is_refused(name, options):
    mixer = build(name, 6, **options)
    _, state = mixer.prefill(tokens(2, 3, 6))
    for wrong in (state[:1], build("mamba", 8).prefill(tokens(2, 3, 8))[1], (1, 2)):
        with pytest.raises(StateError):
            mixer.prefill(tokens(2, 3, 6), wrong)
    with pytest.raises(StateError):
        mixer.prefill(tokens(1, 3, 6), state)


def conv2former_by_equation(mixer, x, grid=None, real=None):
    m, config = mixer.matrices(x.shape[1], grid=grid), mixer.config
    real = torch.ones(x.shape[:2], dtype=torch.bool) if real is None else real
    x = torch.where(real[..., None], x, 0.0)
    if config.norm == "layer":
        centred = x - x.mean(-1, keepdim=True)
        x = centred / (centred.square().mean(-1, keepdim=True) + 1e-6).sqrt() * m["gain"] + m["offset"]
    a = affine(x, m["W_1"], m["b_1"])
    a = F.gelu(a) if config.activation == "gelu" else a
    z = over_tokens(m["A"], a * real[..., None], m["b_A"]) * affine(x, m["W_2"], m["b_2"])
    return affine(z * real[..., None], m["W_3"], m["b_3"])


@pytest.mark.parametrize("grid", [(4, 5), (20,), (1, 20)])
@pytest.mark.parametrize("kernel_size", [1, 3, 11])
@pytest.mark.parametrize("options", [{}, {"activation": "identity", "norm": None, "bias": False}, {"norm": None}])
def test_conv2former_by_its_equation(grid, kernel_size, options):
    """On both kinds of grid; padding is the edge of a 2-D one, and absent from a 1-D one."""
    mixer, x = build("conv2former", 6, grid=grid, kernel_size=kernel_size, **options), tokens(2, 20, 6)
    close(mixer(x), conv2former_by_equation(mixer, x), 1e-12)
    real = torch.rand(2, 20, generator=torch.Generator().manual_seed(0)) > 0.4
    y = mixer(x.masked_fill(~real[..., None], torch.nan), mask=real)
    if len(grid) == 2:
        close(y, conv2former_by_equation(mixer, x, real=real), 1e-12)
        return
    for b in range(2):
        close(y[b, real[b]], conv2former_by_equation(mixer, x[b : b + 1, real[b]])[0], 1e-12)


def test_conv2former_on_feature_maps():
    """(B, D, H, W) says its own grid; tokens need to be told."""
    mixer, x = build("conv2former", 6, kernel_size=5), tokens(2, 6, 4, 7)
    y = conv2former_by_equation(mixer, x.flatten(2).transpose(1, 2), grid=(4, 7))
    close(mixer(x), y.transpose(1, 2).unflatten(2, (4, 7)), 1e-12)
    close(mixer(x.flatten(2).transpose(1, 2), grid=(4, 7)), y, 1e-12)
    for ask in (lambda: mixer(tokens(2, 28, 6)), lambda: mixer.matrices(28), lambda: mixer.cost(28)):
        with pytest.raises(ShapeError, match="grid"):
            ask()


def test_conv2former_is_a_quadratic_form_where_the_paper_says_so():
    options = {"grid": (4, 5), "activation": "identity", "norm": None}
    mixer, x = build("conv2former", 6, bias=False, **options), tokens(1, 20, 6)
    close(mixer(-1.7 * x), 1.7**2 * mixer(x), 1e-12)
    assert (mixer.polynomial.degree, mixer.polynomial.homogeneous) == (2, True)
    assert (build("conv2former", 6, **options).polynomial.homogeneous) is False
    assert build("conv2former", 6, **{**options, "norm": "layer"}).polynomial.degree is None
    assert build("conv2former", 6, **{**options, "activation": "gelu"}).polynomial.degree is None


@pytest.mark.parametrize("options", [
    {"kernel_size": 4}, {"activation": "relu"}, {"norm": "rms"}, {"grid": (2, 2, 2)}, {"grid": 4}, {"kernel_size": 0},
])  # fmt: skip
def test_conv2former_options(options):
    with pytest.raises(OptionError, match=next(iter(options))):
        polymix.create_mixer("conv2former", 6, **options)


def neighbours(q, keys, seen, config):
    """Indices of the nearest keys of one query, by sorting."""

    def nearness(j):
        if config.metric == "dot":
            return (q @ keys[j]).item()
        if config.metric == "cosine":
            return F.cosine_similarity(q, keys[j], dim=0).item()
        return -(q - keys[j]).norm().item()

    order = sorted((j for j in range(len(keys)) if seen[j]), key=nearness, reverse=True)
    return order[: config.k * config.dilation : config.dilation]


def knn_by_equation(mixer, x, context=None, **see):
    """Query by query, head by head."""
    context_ = x if context is None else context
    m, config = mixer.matrices(x.shape[1]), mixer.config
    may = visible(x.shape[0], x.shape[1], context_.shape[1], **see)
    rows = []
    if config.aggregate == "softmax":
        q, keys, v = (affine(source, m[f"W_{letter}"], m[f"b_{letter}"]).unflatten(-1, (mixer.heads, -1))
                      for source, letter in ((x, "q"), (context_, "k"), (context_, "v")))  # fmt: skip
        for b in range(x.shape[0]):
            for i in range(x.shape[1]):
                for h in range(mixer.heads):
                    near = neighbours(q[b, i, h], keys[b, :, h], may[b, i], config)
                    logits = keys[b, near, h] @ q[b, i, h] / q.shape[-1] ** 0.5
                    rows.append(logits.softmax(0) @ v[b, near, h] if near else torch.zeros_like(v[b, 0, h]))
        return affine(torch.stack(rows).view(x.shape), m["W_o"], m["b_o"])
    for b in range(x.shape[0]):
        for i in range(x.shape[1]):
            near = context_[b, neighbours(x[b, i], context_[b], may[b, i], config)]
            if not len(near):
                rows.append(torch.zeros_like(x[b, i]))
            else:
                rows.append(near.mean(0) if config.aggregate == "mean" else (near - x[b, i]).amax(0))
    return affine(x, m["W_x"], None) + affine(torch.stack(rows).view(x.shape), m["W_n"], m["b"])


@pytest.mark.parametrize("aggregate", ["softmax", "max_relative", "mean"])
@pytest.mark.parametrize("metric", ["dot", "cosine", "euclidean"])
@pytest.mark.parametrize("options", [{"k": 1}, {"k": 3, "dilation": 2, "bias": False}, {"k": 40}])
def test_knn_by_its_equation(aggregate, metric, options):
    """Every kind of visibility, with more neighbours asked for than there are, and a separate context."""
    heads = {"heads": 2} if aggregate == "softmax" else {}
    mixer = build("knn", 6, aggregate=aggregate, metric=metric, **options, **heads)
    x, context = tokens(2, 11, 6), tokens(2, 7, 6, seed=1)
    close(mixer(x), knn_by_equation(mixer, x), 1e-12)
    close(mixer(x, context), knn_by_equation(mixer, x, context), 1e-12)
    real = torch.tensor([[i % 3 != 1 for i in range(11)], [False] * 11])
    broken = x.masked_fill(~real[..., None], torch.nan)
    close(mixer(broken, mask=real)[real], knn_by_equation(mixer, x, mask=real)[real], 1e-12)
    assert mixer(broken, mask=real).isfinite().all()
    pairs = torch.rand(2, 11, 11, generator=torch.Generator().manual_seed(0)) > 0.7
    ids = torch.tensor([[0] * 4 + [1] * 7, [2, 1] * 5 + [1]])
    for see in ({"causal": 1}, {"causal": 3}, {"mask": pairs}, {"segments": ids}, {"segments": ids, "causal": 1}):
        close(mixer(x, **see), knn_by_equation(mixer, x, **see), 1e-12)


def test_knn_of_all_tokens_is_attention():
    """With k = N nothing is left out."""
    attention, near = build("softmax", 12, heads=3), build("knn", 12, heads=3, k=9)
    near.load_state_dict(attention.state_dict())
    x = tokens(2, 9, 12)
    close(near(x), attention(x), 1e-12)
    close(near(x.transpose(1, 2).unflatten(2, (3, 3))).flatten(2).transpose(1, 2), attention(x), 1e-12)


@pytest.mark.parametrize("options", [
    {"k": 0}, {"dilation": 0}, {"metric": "l1"}, {"aggregate": "sum"}, {"aggregate": "mean", "heads": 2}, {"heads": 5},
])  # fmt: skip
def test_knn_options(options):
    with pytest.raises(OptionError, match=next(reversed(options))):
        polymix.create_mixer("knn", 6, **options)
