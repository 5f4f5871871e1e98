"""A small model of every library that polymix converts, on which the tests of `test_every_adapter.py` run."""

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.models import VisionTransformer

cure_torchvision()


class Host(NamedTuple):
    """build: the model. inputs: what it is called with. recipe: for `save_pretrained`, where the model does not tell."""

    build: Callable[[], nn.Module]
    inputs: Callable[[], Any]
    recipe: Any = None


def imported(name):
    return pytest.importorskip(name, reason=f"untested: models of {name}, which is not installed")


def whisper_config():
    """Of the smallest Whisper that hears and speaks: one layer each way."""
    return imported("transformers").WhisperConfig(
        vocab_size=64, num_mel_bins=16, d_model=32, encoder_layers=1, decoder_layers=1, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_source_positions=20,
        max_target_positions=24, pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip


def torch_encoder():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(16, 2, 24, dropout=0.0, batch_first=True), 2)


def timm_vit():
    return imported("timm").create_model("vit_tiny_patch16_224", img_size=32, embed_dim=24, depth=2, num_heads=2)


def bert():
    transformers = imported("transformers")
    sizes = {"vocab_size": 40, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 2}
    rest = {"intermediate_size": 24, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.BertModel(transformers.BertConfig(**sizes, **rest))


def torchvision_vit():
    models = imported("torchvision").models
    return models.VisionTransformer(32, 8, 2, 2, 16, 24, num_classes=3)


def diffusers_dit():
    return imported("diffusers").DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=2, num_layers=2, sample_size=8, patch_size=2,
        num_embeds_ada_norm=4,
    )  # fmt: skip


def own_vit():
    return VisionTransformer(polymix.SoftmaxConfig(heads=2), image_size=16, patch_size=4, dim=16, depth=2, classes=3)


def dit_inputs():
    return {
        "hidden_states": torch.randn(2, 2, 8, 8),
        "timestep": torch.tensor([1, 5]),
        "class_labels": torch.tensor([0, 1]),
    }


HOSTS = {
    "torch": Host(torch_encoder, lambda: torch.randn(2, 7, 16), "tests.contracts.library_cases:torch_encoder"),
    "timm": Host(timm_vit, lambda: torch.randn(2, 3, 32, 32)),
    "transformers": Host(bert, lambda: {"input_ids": torch.randint(40, (2, 9))}),
    "torchvision": Host(
        torchvision_vit, lambda: torch.randn(2, 3, 32, 32), "tests.contracts.library_cases:torchvision_vit"
    ),
    "diffusers": Host(diffusers_dit, dit_inputs),
    "polymix": Host(own_vit, lambda: torch.randn(2, 3, 16, 16)),
}
