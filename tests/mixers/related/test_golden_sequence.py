"""Hyena and Conv2Former against the outputs and gradients of their authors' code, Mamba against transformers' layer."""

import pytest
import torch
import torch.nn.functional as F

import polymix
from polymix.errors import OptionError
from polymix.mixers.related import Conv2FormerMixer, HyenaMixer, MambaMixer
from tests.helpers import Golden, build, close, tokens

HYENA, CONV = Golden("hyena_order2"), Golden("conv2former_convmod")


def hyena_gradients(mixer):
    """Gradients of our parameters under the authors' names; their one frequency has three."""
    ours = {name: p.grad for name, p in mixer.named_parameters()}
    named = {key: ours[key] for key in ours if key.split(".")[0] in ("in_proj", "short_filter", "out_proj")}
    named["filter_fn.bias"] = ours["skip"]
    if "filter.taps" in ours:
        return named | {"k": ours["filter.taps"]}
    mlp = "filter_fn.implicit_filter"
    for i in range(mixer.config.filter_depth + 1):
        named |= {f"{mlp}.{2 * i}.{part}": ours[f"filter.layers.{i}.{part}"] for part in ("weight", "bias")}
        named[f"{mlp}.{2 * i + 1}.freq"] = ours["filter.frequency"][None]
    named[f"{mlp}.{2 * mixer.config.filter_depth + 2}.weight"] = ours["filter.last.weight"]
    return named | {"filter_fn.pos_emb.z": ours["filter.z"][None]}


@pytest.mark.parametrize("case", list(HYENA.meta))
def test_hyena(case):
    """Outputs, the taps themselves, and every gradient."""
    inputs = HYENA.part(case, "in")
    options = dict(HYENA.meta[case]["constructor"])
    if "k" in inputs:
        options |= {"filter": "explicit", "k": inputs["k"]}
    mixer = HyenaMixer.from_reference(HYENA.part(case, "w"), **options)
    x = inputs["x"].clone().requires_grad_()
    y, expected = mixer(x), HYENA.part(case, "out")
    close(y, expected["y"], 1e-9)
    if "k" in expected:
        close(mixer.filter(x.shape[1]), expected["k"], 1e-9)
    (y * HYENA.part(case, "cot")["y"]).sum().backward()
    ours = hyena_gradients(mixer)
    grads = HYENA.part(case, "grad/in")
    close(x.grad, grads["x"], 1e-8)
    if "k" in grads:
        close(ours["k"], grads["k"], 1e-8)
    weights = HYENA.part(case, "grad/w")
    assert weights
    for key, value in weights.items():
        close(ours[key], value, 1e-8)


def test_hyena_refuses_what_does_not_fit():
    weights, options = HYENA.part("order2_L12", "w"), HYENA.meta["order2_L12"]["constructor"]
    for change in ({"order": 3}, {"l_max": 8}, {"filter_order": 7}, {"emb_dim": 7}, {"num_inner_mlps": 1}, {"odd": 1}):
        with pytest.raises(OptionError):
            HyenaMixer.from_reference(weights, **{**options, **change})
    with pytest.raises(OptionError, match="state_dict"):
        HyenaMixer.from_reference({key: value for key, value in weights.items() if "freq" not in key}, **options)
    with pytest.raises(OptionError, match="state_dict"):  # explicit, but no taps
        HyenaMixer.from_reference(weights, filter="explicit")
    with pytest.raises(OptionError, match="skip"):
        HyenaMixer.from_reference({**weights, "filter_fn.bias": torch.zeros(5)}, **options)


def conv_gradients(mixer):
    ours = {name: p.grad for name, p in mixer.named_parameters()}
    named = {key: ours[key] for key in ("norm.weight", "norm.bias", "proj.bias")}
    for kind in ("weight", "bias"):
        named[f"att.0.{kind}"], named[f"v.{kind}"] = ours[f"into.{kind}"].chunk(2)
    named |= {"att.2.weight": ours["conv"], "att.2.bias": ours["conv_bias"], "proj.weight": ours["proj.weight"]}
    return {key: g[..., None, None] if g.ndim == 2 else g for key, g in named.items()}


def test_conv2former():
    case = "convmod_k11"
    mixer = Conv2FormerMixer.from_reference(CONV.part(case, "w"), **CONV.meta[case]["constructor"])
    x = CONV.part(case, "in")["x"].clone().requires_grad_()
    y = mixer(x)
    close(y, CONV.part(case, "out")["y"], 1e-9)
    (y * CONV.part(case, "cot")["y"]).sum().backward()
    close(x.grad, CONV.part(case, "grad/in")["x"], 1e-8)
    ours = conv_gradients(mixer)
    for key, value in CONV.part(case, "grad/w").items():
        close(ours[key], value, 1e-8)


def test_conv2former_in_its_block():
    """The mixer's part of a whole block's weights; the rest of the block in plain torch."""
    case = "block_k5"
    weights = {key: value.clone().requires_grad_() for key, value in CONV.part(case, "w").items()}
    mixer = Conv2FormerMixer.from_reference(CONV.part(case, "w"), **CONV.meta[case]["constructor"])
    x = CONV.part(case, "in")["x"].clone().requires_grad_()

    def w(name):
        return weights[name]

    y = x + w("layer_scale_1")[:, None, None] * mixer(x)
    normed = F.layer_norm(y.movedim(1, -1), (4,), w("mlp.norm.weight"), w("mlp.norm.bias"), 1e-6).movedim(-1, 1)
    t = F.gelu(F.conv2d(normed, w("mlp.fc1.weight"), w("mlp.fc1.bias")))
    t = t + F.gelu(F.conv2d(t, w("mlp.pos.weight"), w("mlp.pos.bias"), padding=1, groups=8))
    y = y + w("layer_scale_2")[:, None, None] * F.conv2d(t, w("mlp.fc2.weight"), w("mlp.fc2.bias"))
    close(y, CONV.part(case, "out")["y"], 1e-9)
    (y * CONV.part(case, "cot")["y"]).sum().backward()
    close(x.grad, CONV.part(case, "grad/in")["x"], 1e-8)
    ours = {f"attn.{key}": value for key, value in conv_gradients(mixer).items()}
    for key, value in CONV.part(case, "grad/w").items():
        close(ours[key] if key in ours else weights[key].grad, value, 1e-8)


def test_conv2former_refuses_what_does_not_fit():
    weights, options = CONV.part("convmod_k11", "w"), CONV.meta["convmod_k11"]["constructor"]
    for change in ({"kernel_size": 7}, {"norm": None}, {"odd": 1}, {"bias": False}):
        with pytest.raises(OptionError):
            Conv2FormerMixer.from_reference(weights, **{**options, **change})
    with pytest.raises(OptionError, match="proj"):
        Conv2FormerMixer.from_reference({**weights, "proj.weight": torch.zeros(6, 5, 1, 1)}, **options)


@pytest.mark.parametrize("options", [{}, {"bias": False}, {"state_size": 3, "conv_kernel": 2, "time_step_rank": 4}])
def test_mamba_equals_the_layer_that_it_wraps(options):
    """transformers' own forward, which scans token by token in float32, on the same weights."""
    mixer = build("mamba", 12, **options).float()
    x = tokens(2, 37, 12, dtype=torch.float32).requires_grad_()
    theirs = mixer.layer.eval()(x)
    close(mixer(x), theirs, 1e-5)
    ours, expected = (torch.autograd.grad(y.square().sum(), (x, *mixer.parameters())) for y in (mixer(x), theirs))
    for a, b in zip(ours, expected, strict=True):
        close(a, b, 1e-4)


def test_mamba_from_a_state_dict():
    """Of the usual kind: no bias at the projections, one at the convolution. Widths come from the weights."""
    source = polymix.create_mixer("mamba", 12, state_size=5, expand=3, conv_kernel=3, time_step_rank=2)
    with torch.no_grad():
        for linear in (source.layer.in_proj, source.layer.out_proj):
            linear.bias.zero_()
    weights = {key: v for key, v in source.layer.state_dict().items() if key not in ("in_proj.bias", "out_proj.bias")}
    mixer = MambaMixer.from_reference(weights, d_state=5)
    x = tokens(2, 9, 12, dtype=torch.float32)
    assert torch.equal(mixer(x), source(x))
    for change in ({"d_state": 4}, {"expand": 2}, {"odd": 1}):
        with pytest.raises(OptionError):
            MambaMixer.from_reference(weights, **change)
    with pytest.raises(OptionError, match="state_dict"):
        MambaMixer.from_reference({**weights, "odd": weights["D"]})
    with pytest.raises(OptionError, match="dt_proj"):
        MambaMixer.from_reference({**weights, "dt_proj.bias": torch.zeros(3)})
