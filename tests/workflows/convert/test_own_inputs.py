"""`polymix convert` without data: models of sound, and of captions, get an input that they take."""

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import OptionError
from polymix.workflows.convert.inputs import random_input
from polymix.workflows.convert.noise import own_input
from polymix.workflows.convert.sources import Source
from tests.contracts.library_cases import imported, whisper_config

cure_torchvision()


def test_sound():
    transformers = imported("transformers")
    config = whisper_config()
    model = transformers.WhisperForConditionalGeneration(config).eval()
    inputs = random_input(model)
    assert inputs["input_features"].shape[1:] == (16, 40)
    assert len(polymix.convert(model, "qt", input=inputs).adapters) == 3
    with pytest.raises(OptionError, match="--image-size"):
        random_input(model, size=32)
    with pytest.raises(OptionError, match="neither text nor images"):
        random_input(torch.nn.Sequential(torch.nn.Identity(), torch.nn.Linear(2, 2)))


def test_a_generator_of_captions():
    diffusers = imported("diffusers")
    model = diffusers.SD3Transformer2DModel(
        sample_size=8, patch_size=2, in_channels=4, num_layers=2, attention_head_dim=8, num_attention_heads=4,
        joint_attention_dim=24, caption_projection_dim=32, pooled_projection_dim=16, out_channels=4, pos_embed_max_size=8,
    ).eval()  # fmt: skip
    inputs = own_input(model, Source(model), 3)
    assert inputs["encoder_hidden_states"].shape[::2] == (3, 24) and inputs["pooled_projections"].shape == (3, 16)
    assert all(layer.now == "qt" for layer in polymix.convert(model, "qt", input=inputs).layers)
