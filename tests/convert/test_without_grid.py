"""A mixer of a grid of two axes, in a host whose tokens are in a row: refused with the way out, before any change."""

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import OptionError
from tests.convert.checks import answer, refuses
from tests.convert.saving_cases import bert, gpt2, words
from tests.convert.test_families import IDS, encoder, language
from tests.convert.timm_hosts import timm
from tests.helpers import tokens

X = tokens(2, 16, 32, dtype=torch.float32)


def block():
    return nn.TransformerEncoderLayer(32, 4, 48, batch_first=True)


def asks_pytorch():
    from timm.models.vision_transformer_relpos import RelPosAttention

    return nn.Sequential(RelPosAttention(32, 4))


HOSTS = {
    "BERT": (bert, words()), "GPT-2": (gpt2, words()), "a decoder, read by names": (lambda: language("qwen3"), {"input_ids": IDS}),
    "an encoder, read by names": (lambda: encoder("deberta-v2"), {"input_ids": IDS}), "torch.nn": (block, X),
    "timm": (lambda: timm.layers.Attention(32, 4), X), "a layer that asks PyTorch": (asks_pytorch, X),
}  # fmt: skip


@pytest.mark.parametrize("mixer", ["focused", "tesa"])
@pytest.mark.parametrize("name", HOSTS)
def test_a_mixer_of_a_grid_is_refused_with_the_way_out(name, mixer):
    build, inputs = HOSTS[name]
    way_out = "Pass grid="
    refuses(build(), mixer, (OptionError, polymix.errors.ShapeError), way_out, input=inputs)
    if name != "a layer that asks PyTorch":  # which is read from a call
        refuses(build(), mixer, (OptionError, polymix.errors.ShapeError), way_out)


@pytest.mark.parametrize("name", ["torch.nn", "timm", "a layer that asks PyTorch"])
def test_that_way_out_works(name):
    build, inputs = HOSTS[name]
    model = polymix.convert(build(), "focused", input=inputs, grid=(4, 4)).model
    assert answer(model, inputs)[0].isfinite().all()


def test_the_other_way_out_is_named():
    refuses(bert(), "focused", OptionError, "tokens in a row, such as qt")
