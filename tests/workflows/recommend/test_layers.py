"""Attention layers are found as models hold them, with what they are called with."""

import pytest
import torch
from torch import nn

from polymix.compat import cure_torchvision
from polymix.convert.find import attention_modules, known_input
from polymix.convert.masks import Seen, seen_through
from polymix.convert.tracing import call_of
from polymix.mixers import PadreConfig, SoftmaxConfig, SoftmaxMixer
from polymix.models import VisionTransformer
from polymix.workflows.recommend import Shape
from polymix.workflows.recommend.layers import record
from tests.workflows.recommend.helpers import SplitProjections


def found(model, *args, **kwargs):
    layers, notes = record(model, call_of(model.eval(), args, kwargs, False), False)
    assert not notes
    return layers


def test_our_vit_with_its_own_grid():
    model = VisionTransformer(
        SoftmaxConfig(heads=2), image_size=(8, 16), patch_size=4, dim=8, depth=3, class_token=True
    )
    (layer,) = found(model, torch.randn(2, 3, 8, 16))
    assert layer.names == ("blocks.0.mixer", "blocks.1.mixer", "blocks.2.mixer")
    assert layer.shape == Shape(tokens=9, dim=8, heads=2, batch=2, grid=(2, 4))
    assert layer.shape.prefix == 1


def test_a_layer_with_biases_is_not_refused_for_them():
    model = VisionTransformer(SoftmaxConfig(heads=2, relative=True), image_size=8, patch_size=4, dim=8, depth=1)
    (layer,) = found(model, torch.randn(2, 3, 8, 8))
    assert layer.refused({"padre": PadreConfig()}) == {}
    assert isinstance(model.blocks[0].mixer, SoftmaxMixer)


def test_a_mixer_is_no_attention():
    model = VisionTransformer(PadreConfig(kernel_size=3), image_size=8, patch_size=4, dim=8, depth=1)
    assert not dict(attention_modules(model))


def test_timm():
    cure_torchvision()
    timm = pytest.importorskip("timm", reason="untested: timm's attention, for which timm is needed")
    model = timm.create_model("vit_tiny_patch16_224", pretrained=False, img_size=32, depth=2, embed_dim=24, num_heads=3)
    (layer,) = found(model, torch.randn(1, 3, 32, 32))
    assert layer.names == ("blocks.0.attn", "blocks.1.attn")
    assert layer.shape == Shape(tokens=5, dim=24, heads=3, grid=(2, 2)), "a class token before a grid of 2 × 2"


@pytest.mark.parametrize("batch_first", [True, False])
def test_multihead_attention_alone(batch_first):
    x = torch.randn(2, 9, 8) if batch_first else torch.randn(9, 2, 8)
    (layer,) = found(nn.MultiheadAttention(8, 2, batch_first=batch_first), x, x, x)
    assert layer.shape == Shape(tokens=9, dim=8, heads=2, batch=2, grid=(3, 3), assumed=True)


def test_the_fast_path_of_the_encoder_hides_nothing():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2)
    (layer,) = found(model, torch.randn(2, 9, 8))
    assert layer.names == ("layers.0.self_attn", "layers.1.self_attn")
    assert torch.backends.mha.get_fastpath_enabled(), "it is on again for the measurement"
    with torch.inference_mode():
        layer.call(False)()


def test_an_encoder_with_a_causal_mask_and_padding():
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)
    mask, padding = torch.ones(9, 9).triu(1).bool(), torch.zeros(2, 9, dtype=torch.bool)
    padding[0, 7:] = True
    (layer,) = found(model, torch.randn(2, 9, 8), mask=mask, src_key_padding_mask=padding)
    assert layer.shape == Shape(tokens=9, dim=8, heads=2, batch=2, grid=(9,), causal=True, mask="padding")


def test_a_decoder_attends_to_itself_and_to_a_context():
    model = nn.TransformerDecoder(nn.TransformerDecoderLayer(8, 2, 16, batch_first=True), 1)
    layers = found(model, torch.randn(1, 9, 8), torch.randn(1, 4, 8))
    assert [layer.shape.cross for layer in layers] == [None, 4]


def test_split_projections_causal_by_attribute_or_cross():
    (layer,) = found(SplitProjections(causal=True), torch.randn(1, 6, 8))
    assert layer.shape == Shape(tokens=6, dim=8, heads=2, grid=(6,), causal=True)
    (layer,) = found(SplitProjections(), torch.randn(1, 6, 8), key_value_states=torch.randn(1, 5, 8))
    assert layer.shape.cross == 5 and not layer.shape.causal


def test_a_call_again_and_again_fills_no_cache():
    cache = []
    (layer,) = found(SplitProjections(), torch.randn(1, 6, 8), past_key_values=cache)
    layer.call(False)()
    assert len(cache) == 1, "the model's own run alone"


def test_a_layer_is_timed_as_self_attention_if_it_is():
    x = torch.randn(1, 4, 8)
    (layer,) = found(nn.MultiheadAttention(8, 2, batch_first=True), x, x, x)
    assert layer.args[0] is layer.args[1] is layer.args[2], "three copies would be projected apart"


def test_transformers():
    cure_torchvision()
    transformers = pytest.importorskip("transformers", reason="untested: transformers' attention")
    gpt = transformers.GPT2Model(transformers.GPT2Config(n_embd=8, n_layer=2, n_head=2, vocab_size=20, n_positions=16))
    bert = transformers.BertModel(transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=2,
                                                          intermediate_size=8, vocab_size=20))  # fmt: skip
    for model, causal, count in ((gpt, True, 2), (bert, False, 1)):
        layers, _ = record(model, call_of(model.eval(), (torch.arange(6)[None],), {}, False), True)
        (layer,) = layers
        assert len(layer.names) == count
        assert layer.shape == Shape(tokens=6, dim=8, heads=2, grid=(6,), causal=causal), type(model).__name__
        layer.call(True)()


def test_masks_in_every_convention():
    tril = torch.ones(4, 4).tril().bool()
    added = torch.zeros(1, 1, 4, 4).masked_fill(~tril, torch.finfo(torch.float32).min)
    padded = torch.tensor([[1, 1, 0, 0]])
    plain, mha = nn.Identity(), nn.MultiheadAttention(4, 1)
    for module, given, expected in (
        (plain, {}, Seen(False, None)), (plain, {"attention_mask": added}, Seen(True, None)), (plain, {"mask": tril}, Seen(True, None)),
        (mha, {"attn_mask": ~tril}, Seen(True, None)), (plain, {"attention_mask": padded}, Seen(False, "padding")),
        (mha, {"key_padding_mask": torch.zeros(2, 4).bool()}, Seen(False, None)), (plain, {"is_causal": True}, Seen(True, None)),
        (plain, {"mask": tril.roll(1, 1)}, Seen(False, "arbitrary")), (plain, {"mask": tril & padded.bool()}, Seen(True, "padding")),
    ):  # fmt: skip
        assert seen_through(module, given, 4, 4) == expected, given


def test_inputs_that_a_model_tells():
    model = VisionTransformer(SoftmaxConfig(), image_size=(8, 12), patch_size=4, dim=8, depth=1, channels=2)
    assert known_input(model, 3).shape == (3, 2, 8, 12)
