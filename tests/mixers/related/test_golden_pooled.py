"""Outputs and gradients of timm's non-local, squeeze-excite and global context blocks, in float64."""

import pytest
import torch

import polymix
from polymix.mixers.related import GcMixer, NonLocalMixer, SeMixer
from tests.helpers import Golden, close

TIMM = Golden("timm_nonlocal_se_gc")
# bat_nonlocal is another mechanism, bilinear transforms of rows and columns, that shares the file alone.
MIXERS = {
    "nonlocal": NonLocalMixer, "se": SeMixer, "effective_se": SeMixer, "gc_scale": GcMixer, "gc_scale_add": GcMixer,
}  # fmt: skip
# A bias that moves every logit of a softmax alike: its gradient is zero, and what is recorded is rounding.
DEAD = {("nonlocal", "p.bias"), ("gc_scale", "conv_attn.bias"), ("gc_scale_add", "conv_attn.bias")}


def load(case, **changes):
    constructor = TIMM.meta[case]["constructor"]
    return MIXERS[case].from_reference(TIMM.part(case, "w"), **{**constructor, **changes}).eval()


def test_every_case_is_accounted_for():
    assert set(TIMM.meta) == {*MIXERS, "bat_nonlocal"}


@pytest.mark.parametrize("case", list(MIXERS))
def test_outputs_and_gradients(case):
    mixer = load(case)
    x = TIMM.part(case, "in")["x"].clone().requires_grad_()
    y = mixer(x)
    close(y, TIMM.part(case, "out")["y"], 1e-9)
    (y * TIMM.part(case, "cot")["y"]).sum().backward()
    close(x.grad, TIMM.part(case, "grad/in")["x"], 1e-8)
    ours = {name.removeprefix("layer."): p.grad for name, p in mixer.named_parameters()}
    theirs = TIMM.part(case, "grad/w")
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        if (case, name) in DEAD:
            assert ours[name].abs().max() < 1e-13
            assert value.abs().max() < 1e-13
        else:
            close(ours[name], value, 1e-8)


@pytest.mark.parametrize("case", list(MIXERS))
def test_tokens_give_what_feature_maps_give(case):
    mixer, x = load(case), TIMM.part(case, "in")["x"]
    y = mixer(x.flatten(2).transpose(1, 2))
    close(y.transpose(1, 2).unflatten(2, x.shape[2:]), TIMM.part(case, "out")["y"], 1e-9)


def test_batch_norm_in_training_is_timm_s():
    """The averages of the batch in the output, and the running ones after it."""
    from polymix.mixers.related.timm_layers import timm_layer

    mixer = load("nonlocal").train()
    theirs = timm_layer("NonLocalAttn")(12).double()
    theirs.load_state_dict(TIMM.part("nonlocal", "w"))
    x = TIMM.part("nonlocal", "in")["x"]
    close(mixer(x), theirs.train()(x), 1e-12)
    close(mixer.layer.norm.running_var, theirs.norm.running_var, 1e-12)


def test_ours_loads_what_timm_never_saves():
    """No norm, no biases, another form: a state dict of ours comes back as it was."""
    for mixer in (
        polymix.create_mixer("non_local", 12, bias=False, form="dot_product", rd_channels=5),
        polymix.create_mixer("se", 12, bias=False, rd_channels=5),
        polymix.create_mixer("se", 12, bias=False, form="effective"),
        polymix.create_mixer("gc", 12, fuse_scale=False, fuse_add=True, use_attn=False, residual=True),
    ):
        options = {"form": "dot_product", "residual": False} if mixer.name == "non_local" else {}
        again = type(mixer).from_reference(mixer.layer.state_dict(), **options)
        x = torch.randn(2, 5, 12)
        assert torch.equal(again(x), mixer(x))


@pytest.mark.parametrize(("case", "change", "named"), [
    ("nonlocal", {"in_channels": 16}, "in_channels"), ("nonlocal", {"rd_channels": 4}, "rd_channels"),
    ("nonlocal", {"norm": None, "form": "dot"}, "form"), ("nonlocal", {"groups": 2}, "groups"),
    ("se", {"form": "effective"}, "form"), ("se", {"channels": 10}, "channels"), ("se", {"_class": "GlobalContext"}, "_class"),
    ("gc_scale", {"fuse_add": True}, "fuse_add"), ("gc_scale", {"residual": True}, "residual"),
])  # fmt: skip
def test_options_that_the_weights_deny(case, change, named):
    with pytest.raises(polymix.errors.OptionError, match=named):
        load(case, **change)


@pytest.mark.parametrize("case", list(MIXERS))
def test_state_dicts_that_do_not_fit(case):
    weights = TIMM.part(case, "w")
    name = next(key for key in weights if key.endswith("fc2.bias") or key in ("z.bias", "fc.bias"))
    weight = name.replace("bias", "weight")
    for broken in (
        {**weights, "more": weights[name]},
        {key: value for key, value in weights.items() if key != weight},
        {**weights, name: weights[name][:-1]},
        {},
    ):
        with pytest.raises(polymix.errors.OptionError, match="state_dict"):
            MIXERS[case].from_reference(broken)
