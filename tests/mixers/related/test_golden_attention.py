"""Linear-attention mechanisms against public implementations in float64: outputs, and gradients of inputs and weights."""

import pytest
import torch

import polymix
import polymix.mixers.related  # registers the mechanisms
from polymix.mixers.related import CastlingMixer, FocusedMixer, ReluLinearMixer, SimaMixer, XcaMixer
from polymix.ops.related.linear_attention import linear_attention
from tests.helpers import Golden, close

OPS, LITE = Golden("flashbla_ops"), Golden("efficientvit_litemla")
FILES = {
    "sima": (Golden("sima"), SimaMixer), "castling": (Golden("castling_linangular"), CastlingMixer),
    "focused": (Golden("flatten_focused"), FocusedMixer), "relu_linear": (LITE, ReluLinearMixer),
    "xca": (Golden("xcit_xca"), XcaMixer),
}  # fmt: skip
CASES = [(name, case) for name, (golden, _) in FILES.items() for case in golden.meta]
# What our options say and the authors' arguments do not: which class it is, or how many rows there are.
EXTRA = {("sima", "class_attention"): {"class_attention": True}, ("focused", "pvt_sr1"): {"grid": (3, 4)}}


def make(name, case, **extra):
    golden, cls = FILES[name]
    options = {**golden.meta[case]["constructor"], **EXTRA.get((name, case), {}), **extra}
    return golden, cls.from_reference(golden.part(case, "w"), **options)


def gradients(name, mixer):
    """Gradients of our parameters under the authors' names."""
    grads = {key: p.grad for key, p in mixer.named_parameters()}
    if name in ("relu_linear", "xca"):
        return {key.split(".", 1)[1]: value for key, value in grads.items()}
    ours = {key.replace("qkv.qkv", "qkv"): value for key, value in grads.items()}
    if name == "castling":
        ours["dconv.weight"] = ours.pop("conv").unsqueeze(-1)
    if name == "focused":
        for kind in ("weight", "bias"):
            dim = ours[f"qkv.{kind}"].shape[0] // 3
            ours[f"q.{kind}"], ours[f"kv.{kind}"] = ours[f"qkv.{kind}"].split((dim, 2 * dim))
    return ours


@pytest.mark.parametrize(("name", "case"), CASES)
def test_outputs_and_gradients(name, case):
    golden, mixer = make(name, case)
    x = golden.part(case, "in")["x"].clone().requires_grad_()
    y = mixer.eval()(x)
    expected = golden.part(case, "out")["y"]
    assert y.shape == expected.shape
    close(y, expected, 1e-9)
    (y * golden.part(case, "cot")["y"]).sum().backward()
    close(x.grad, golden.part(case, "grad/in")["x"], 1e-8)
    ours = gradients(name, mixer)
    for key, value in golden.part(case, "grad/w").items():
        if value.any():
            close(ours[key], value, 1e-8)
        else:
            assert not ours[key].any(), key


@pytest.mark.parametrize("case", list(OPS.meta))
def test_the_op(case):
    parts = [part.clone().requires_grad_() for part in OPS.part(case, "in").values()]
    options = {"linear_attn_scale1": {"scale": 1.0}, "simple_la": {"scale": 4**-0.5, "normalize": False}}
    y = linear_attention(*parts, **options.get(case, {}))
    close(y, OPS.part(case, "out")["y"], 1e-9)
    (y * OPS.part(case, "cot")["y"]).sum().backward()
    for part, value in zip(parts, OPS.part(case, "grad/in").values(), strict=True):
        close(part.grad, value, 1e-8)


def test_relu_linear_is_timm_s_layer():
    """timm's module itself, loaded with the same weights: the same layer but for its eps and its float32."""
    golden, mixer = make("relu_linear", "multi_scale5_linear", eps=1e-5)
    x = golden.part("multi_scale5_linear", "in")["x"]
    close(mixer.eval()(x), mixer.mla.eval()(x), 1e-5)


def test_batch_norm_of_relu_linear_learns_as_timm_s():
    _, mixer = make("relu_linear", "single_scale_linear", eps=1e-5)
    x = torch.randn(3, 8, 4, 4, dtype=torch.float64)
    other = make("relu_linear", "single_scale_linear")[1].mla.train()
    close(mixer.train()(x), other(x), 1e-4)
    close(mixer.mla.proj.norm.running_mean, other.proj.norm.running_mean, 1e-4)


@pytest.mark.parametrize(("name", "case", "change", "named"), [
    ("sima", "n_ge_d", {"num_head": 2}, "num_head"), ("sima", "n_ge_d", {"bias": False}, "bias"),
    ("castling", "inference", {"res_kernel_size": 7}, "kernel_size"), ("castling", "inference", {"attn_drop": 0.1}, "attn_drop"),
    ("focused", "pvt_sr1", {"grid": None}, "grid"), ("focused", "pvt_sr1", {"sr_ratio": 2}, "sr_ratio"),
    ("focused", "pvt_sr1", {"grid": (3, 5)}, "positional_encoding"),
    ("relu_linear", "single_scale_linear", {"dim": 3}, "dim"), ("relu_linear", "single_scale_linear", {"scales": (5,)}, "scales"),
    ("relu_linear", "single_scale_linear", {"norm": (None, None)}, "norm"),
    ("relu_linear", "single_scale_linear", {"kernel_func": "gelu"}, "kernel_func"),
    ("relu_linear", "single_scale_linear", {"out_channels": 16}, "out_channels"),
    ("xca", "heads2", {"num_heads": 4}, "temperature"), ("xca", "heads2", {"attn_drop": 0.1}, "attn_drop"),
])  # fmt: skip
def test_options_that_the_weights_do_not_fit_say_so(name, case, change, named):
    with pytest.raises(polymix.errors.OptionError, match=named):
        make(name, case, **change)


@pytest.mark.parametrize(("name", "case"), CASES)
def test_a_weight_too_few_or_too_many_is_named(name, case):
    golden, cls = FILES[name]
    weights = golden.part(case, "w")
    options = {**golden.meta[case]["constructor"], **EXTRA.get((name, case), {})}
    lacking = {key: value for key, value in weights.items() if key != "proj.weight" and key != "proj.conv.weight"}
    with pytest.raises(polymix.errors.OptionError, match="state_dict"):
        cls.from_reference(lacking, **options)
    with pytest.raises(polymix.errors.OptionError, match="stranger"):
        cls.from_reference({**weights, "stranger": torch.zeros(1)}, **options)
