"""Fresh weights of a host as published: which layers they reach, and how large they are."""

import math

import pytest
import torch
from torch import nn

from polymix.blocks import MixerBlock
from polymix.mixers import PomConfig
from polymix.mixers.softmax import SoftmaxConfig
from polymix.train.initial import start_as_pytorch, start_as_xavier


def host(mixer):
    torch.manual_seed(0)
    return nn.Sequential(MixerBlock(64, mixer), nn.Linear(64, 64))


@pytest.mark.parametrize(("start", "deviation"), [
    (start_as_xavier, lambda layer: math.sqrt(2 / (layer.in_features + layer.out_features))),
    (start_as_pytorch, lambda layer: 1 / math.sqrt(3 * layer.in_features)),
])  # fmt: skip
def test_the_host_starts_as_published_and_its_mixer_as_it_did(start, deviation):
    model = host(PomConfig())
    before = {name: value.clone() for name, value in model[0].mixer.state_dict().items()}
    start(model)
    assert all(torch.equal(value, before[name]) for name, value in model[0].mixer.state_dict().items())
    for layer in (model[0].mlp[0], model[0].mlp[3], model[1]):
        assert layer.weight.std().item() == pytest.approx(deviation(layer), rel=0.05)
        assert layer.bias.any() == (start is start_as_pytorch)


def test_attention_is_the_host_s_own():
    model = host(SoftmaxConfig())
    start_as_xavier(model)
    qkv = model[0].mixer.qkv.qkv.weight
    assert qkv.std().item() == pytest.approx(math.sqrt(2 / (4 * 64)), rel=0.05), "of one matrix for all three"
