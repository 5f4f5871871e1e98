"""Mamba and Hyena in both directions, with a class token first or in the middle, against slow definitions."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, MaskError, OptionError
from polymix.models import VisionTransformer
from tests.helpers import build, close, jitter, tokens
from tests.mixers.related.test_sequence import affine, mamba_scan, over_tokens

SHORT = {
    "mamba": ("mamba", {"state_size": 3, "conv_kernel": 3}),
    "mamba-plain": ("mamba", {"state_size": 2, "bias": False}),
    "hyena": ("hyena", {"length": 20, "order": 3}),
    "hyena-explicit": ("hyena", {"filter": "explicit", "length": 5, "bias": False}),
    "hyena-long": ("hyena", {"filter": "explicit", "length": 70}),
}


def both_ways(key, prefix=0, **options):
    name, own = SHORT[key]
    middle = {"class_token": "middle", "num_prefix_tokens": prefix} if prefix else {}
    return build(name, 6, bidirectional=True, **own, **middle, **options)


def mamba_branch(m, u):
    return mamba_scan(m, u)[0]


def hyena_branch(m, u, order):
    *gates, v = over_tokens(m["T"], u, m["b_short"]).chunk(order + 1, dim=-1)
    for s in range(1, order):
        v = over_tokens(m["H"][s - 1], v * gates[order - s], None)
    return v * gates[0]


def by_definition(mixer, x, prefix):
    """All tokens one after the other in a scan's order; each branch with its own weights; back in their places."""
    n = x.shape[1]
    half = (n - prefix) // 2
    order = [*range(prefix, prefix + half), *range(prefix), *range(prefix + half, n)]
    m = mixer.matrices(n)
    u = affine(x, m["W_in"], m["b_in"])
    if mixer.name == "mamba":
        u, z = u.chunk(2, dim=-1)
    total = 0
    for matrices, places in ((m, order), (m["back"], order[::-1])):
        y = mamba_branch(matrices, u[:, places]) if mixer.name == "mamba" else None
        y = hyena_branch(matrices, u[:, places], mixer.config.order) if y is None else y
        total = total + y[:, [places.index(i) for i in range(n)]]
    return affine(total * F.silu(z) if mixer.name == "mamba" else total, m["W_out"], m["b_out"])


@pytest.mark.parametrize("prefix", [0, 1, 2])
@pytest.mark.parametrize("key", list(SHORT))
def test_both_directions_by_their_definition(key, prefix):
    mixer = both_ways(key, prefix)
    for n in (prefix + 1, 8, 13):
        x = tokens(2, n, 6)
        close(mixer(x), by_definition(mixer, x, prefix), 1e-12)


@pytest.mark.parametrize("prefix", [0, 2])
@pytest.mark.parametrize("key", list(SHORT))
@given(data=st.data())
def test_padding_is_as_if_it_were_not_there(key, prefix, data):
    """For both scans: padding before the last real tokens would otherwise enter the backward convolution."""
    mixer, x = both_ways(key, prefix), tokens(2, 11, 6)
    rows = st.lists(st.booleans(), min_size=11 - prefix, max_size=11 - prefix)
    drawn = torch.tensor(data.draw(st.lists(rows, min_size=2, max_size=2)))
    real = torch.cat((torch.ones(2, prefix, dtype=torch.bool), drawn), dim=1)
    y = mixer(x.masked_fill(~real[..., None], torch.nan), mask=real)
    for b in range(2):
        if drawn[b].any():
            close(y[b, real[b]], by_definition(mixer, x[b : b + 1, real[b]], prefix)[0], 1e-12)


@pytest.mark.parametrize("key", list(SHORT))
def test_reversing_the_tokens_swaps_the_branches(key):
    mixer, x = both_ways(key), tokens(2, 9, 6)
    swapped = both_ways(key)
    state, other = mixer.state_dict(), {}
    for name in state:
        if name.startswith("back."):
            other[name] = state[name.replace("back.", "layer.") if mixer.name == "mamba" else name[5:]]
        else:
            twin = "back." + name.removeprefix("layer.")
            other[name] = state.get(twin, state[name])
    swapped.load_state_dict(other)
    close(swapped(x.flip(1)).flip(1), mixer(x), 1e-12)
    assert (mixer(x.flip(1)).flip(1) - mixer(x)).abs().max() > 1e-3, "the branches have weights of their own"


@pytest.mark.parametrize("prefix", [0, 1])
@pytest.mark.parametrize("name", ["mamba", "hyena"])
def test_every_token_sees_every_other(name, prefix):
    middle = {"class_token": "middle", "num_prefix_tokens": prefix} if prefix else {}
    mixer = build(name, 4, bidirectional=True, **middle)
    jacobian = torch.autograd.functional.jacobian(mixer, tokens(1, 7, 4)).abs().amax((0, 2, 3, 5))
    assert jacobian.min() > 1e-8 * jacobian.max()


@pytest.mark.parametrize("name", ["mamba", "hyena"])
def test_what_both_directions_cannot_do_is_refused(name):
    mixer, x = build(name, 6, bidirectional=True), tokens(2, 8, 6)
    ids = torch.zeros(2, 8, dtype=torch.int64)
    for call in ({"causal": True}, {"causal": 3}, {"segments": ids}, {"mask": torch.ones(2, 8, 8, dtype=torch.bool)}):
        with pytest.raises(CapabilityError):
            mixer(x, **call)
    with pytest.raises(CapabilityError):
        mixer.prefill(x)
    close(mixer(x, causal=False), mixer(x), 0)
    with pytest.raises(MaskError, match="Build it with bidirectional=True"):
        build(name, 6)(x, causal=False)


@pytest.mark.parametrize("name", ["mamba", "hyena"])
@pytest.mark.parametrize(("options", "argument"), [
    ({"class_token": "middle"}, "class_token"), ({"bidirectional": True, "class_token": "last"}, "class_token"),
    ({"bidirectional": True, "class_token": "middle"}, "class_token"), ({"bidirectional": "yes"}, "bidirectional"),
    ({"bidirectional": True, "num_prefix_tokens": 1}, "num_prefix_tokens"),
    ({"bidirectional": True, "class_token": "middle", "num_prefix_tokens": -1}, "num_prefix_tokens"),
])  # fmt: skip
def test_options_of_both_directions(name, options, argument):
    with pytest.raises(OptionError, match=argument):
        polymix.create_mixer(name, 6, **options)


@pytest.mark.parametrize("place", ["first", "middle"])
@pytest.mark.parametrize("name", ["mamba", "hyena"])
def test_in_a_host_with_a_class_token(name, place):
    """The class token reads all patches in the first block, wherever it stands."""
    torch.manual_seed(0)
    config = polymix.mixers.config_class(name)(bidirectional=True, class_token=place)
    size = {"image_size": 8, "patch_size": 2, "dim": 12, "classes": 3, "channels": 1}
    model = VisionTransformer(config, depth=1, class_token=True, **size).double()
    jitter(model, scale=0.1)  # the class token starts at zero, which gates nothing through
    assert model.blocks[0].mixer.config.num_prefix_tokens == (place == "middle")
    images = torch.randn(2, 1, 8, 8, dtype=torch.float64, requires_grad=True)
    model(images).square().sum().backward()
    assert images.grad.flatten(1).abs().min() > 0
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    if place == "middle":
        with pytest.raises(OptionError, match="'middle' without tokens in front"):
            VisionTransformer(config, depth=1, **size)
    with pytest.raises(OptionError, match="bidirectional=True"):
        VisionTransformer(polymix.mixers.config_class(name)(), depth=1, class_token=True, **size)


def test_time_steps_of_each_direction():
    mixer, x = both_ways("mamba", 1), tokens(2, 7, 6)
    m = mixer.matrices(7)
    u = affine(x, m["W_in"], m["b_in"]).chunk(2, dim=-1)[0]
    order = [1, 2, 3, 0, 4, 5, 6]
    for matrices, places, backward in ((m, order, False), (m["back"], order[::-1], True)):
        v = F.silu(over_tokens(matrices["T"], u[:, places], matrices["b_conv"]))
        steps = F.softplus(v @ matrices["W_Delta1"] @ matrices["W_Delta2"] + matrices["b_Delta"])
        close(mixer.time_steps(x, backward=backward), steps[:, [places.index(i) for i in range(7)]], 1e-12)
    with pytest.raises(CapabilityError, match="bidirectional=True"):
        build("mamba", 6).time_steps(x, backward=True)


@pytest.mark.parametrize("grid", [(3, 4), (12,)])
@pytest.mark.parametrize("prefix", [1, 3])
@pytest.mark.parametrize("options", [{}, {"activation": "identity", "norm": None, "bias": False}])
def test_conv2former_beside_a_prefix(grid, prefix, options):
    """A prefix token modulates with its own value and the grid's mean; the grid does not see it."""
    mixer = build("conv2former", 6, grid=grid, kernel_size=3, num_prefix_tokens=prefix, **options)
    alone = build("conv2former", 6, grid=grid, kernel_size=3, **options)
    alone.load_state_dict({name: value for name, value in mixer.state_dict().items() if not name.startswith("prefix")})
    x = tokens(2, 12 + prefix, 6)
    y = mixer(x)
    close(y[:, prefix:], alone(x[:, prefix:]), 1e-12)
    real = torch.ones(2, 12 + prefix, dtype=torch.bool)
    for masked in (False, True):
        if masked:
            real[0, -5:] = real[1, 0] = False
            y = mixer(x.masked_fill(~real[..., None], torch.nan), mask=real)
            close(y[:, prefix:][real[:, prefix:]], alone(x[:, prefix:], mask=real[:, prefix:])[real[:, prefix:]], 1e-12)
        m = mixer.matrices(12 + prefix)
        normed = x if mixer.norm is None else mixer.norm(x)
        a = affine(normed, m["W_1"], m["b_1"])
        a = (a if mixer.config.activation == "identity" else F.gelu(a)) * real[..., None]
        v = affine(normed, m["W_2"], m["b_2"])
        for b in range(2):
            mean = a[b, prefix:][real[b, prefix:]].mean(0)
            for j in range(prefix):
                if real[b, j]:
                    own = mixer.prefix_self[j] * a[b, j] + mixer.prefix_mean[j] * mean
                    own = own if m["b_A"] is None else own + m["b_A"]
                    close(y[b, j], affine(own * v[b, j], m["W_3"], m["b_3"]), 1e-12)
    m = mixer.matrices(12 + prefix)
    normed = x if mixer.norm is None else mixer.norm(x)
    a = affine(normed, m["W_1"], m["b_1"])
    a = a if mixer.config.activation == "identity" else F.gelu(a)
    z = over_tokens(m["A"], a, m["b_A"]) * affine(normed, m["W_2"], m["b_2"])
    close(mixer(x), affine(z, m["W_3"], m["b_3"]), 1e-12)


def deit():
    cure_torchvision()
    import timm

    torch.manual_seed(0)
    sizes = {"img_size": 32, "patch_size": 8, "depth": 1, "embed_dim": 24, "num_heads": 2, "num_classes": 5}
    return timm.create_model("deit_tiny_patch16_224", **sizes).eval()


@pytest.mark.parametrize("mixer", [
    "conv2former:kernel_size=3", "mamba:bidirectional=true:state_size=4", "hyena:bidirectional=true",
    "mamba:bidirectional=true:class_token=middle", "hyena:bidirectional=true:class_token=middle:filter=explicit:length=20",
])  # fmt: skip
def test_in_a_converted_model_with_a_class_token(mixer):
    images = torch.randn(2, 3, 32, 32, requires_grad=True)
    model = polymix.convert(deit(), mixer, input=images.detach()).model
    (inside,) = (part for part in model.modules() if isinstance(part, polymix.TokenMixer))
    assert inside.config.prefix == ("middle" in mixer or "conv2former" in mixer)
    model(images)[0].sum().backward()
    assert images.grad[0].abs().amax(0).unfold(0, 8, 8).unfold(1, 8, 8).amax((2, 3)).min() > 0, "all patches are read"
    assert not images.grad[1].any()


@pytest.mark.parametrize("mixer", ["mamba", "hyena", "padre:causal=true", "pom:decay=2"])
def test_a_causal_mixer_is_refused_where_a_class_token_stands_first(mixer):
    cure = {"mamba": "bidirectional=True", "hyena": "bidirectional=True", "padre": "causal=False", "pom": "decay=None"}
    with pytest.raises(OptionError, match=cure[mixer.partition(":")[0]]):
        polymix.convert(deit(), mixer, input=torch.randn(2, 3, 32, 32))
