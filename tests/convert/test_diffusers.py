"""diffusers' Attention converted, in tiny transformers of the library: images' grids, contexts, masks, and refusals."""

import pytest
import torch
from torch import nn

import polymix
from polymix.compat import cure_torchvision
from polymix.errors import CapabilityError, MaskError, OptionError, ShapeError
from tests.convert.checks import (
    MIXERS,
    answer,
    checkpoints,
    converts,
    identical,
    ignores,
    refuses,
    same_as_host,
    survives,
    undoes,
)

cure_torchvision()
diffusers = pytest.importorskip("diffusers", reason="untested: diffusers' hosts (the diffusion extra)")
from diffusers.models.attention_processor import Attention, AttnProcessor, AttnProcessor2_0  # noqa: E402

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together

LATENTS = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(0))
CONTEXT = torch.randn(2, 5, 16, generator=torch.Generator().manual_seed(1))
KEPT = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 1, 0, 0]])
CALL = {"hidden_states": LATENTS, "timestep": torch.tensor([3, 7]), "class_labels": torch.tensor([1, 2])}
X = torch.randn(2, 7, 16, generator=torch.Generator().manual_seed(2))


UNET = pytest.mark.filterwarnings("ignore:`Transformer2DModelOutput` is deprecated:FutureWarning")  # of the host's own


def dit(layers=2):
    return diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=layers, sample_size=8, patch_size=2,
        norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip


def pixart():
    return diffusers.PixArtTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, num_layers=1, cross_attention_dim=16, sample_size=8, patch_size=2,
        norm_num_groups=4, caption_channels=16, use_additional_conditions=False,
    )  # fmt: skip


def captioned(context=CONTEXT, kept=KEPT):
    return {
        "hidden_states": LATENTS, "encoder_hidden_states": context, "timestep": CALL["timestep"],
        "encoder_attention_mask": kept, "added_cond_kwargs": {"resolution": None, "aspect_ratio": None},
    }  # fmt: skip


def within_unet():
    """The transformer between a U-Net's convolutions."""
    return diffusers.Transformer2DModel(2, 8, in_channels=16, num_layers=1, norm_num_groups=4, cross_attention_dim=16)


def layer(**options):
    return Attention(query_dim=16, heads=2, dim_head=8, **options)


# DiT


def test_dit_with_softmax_is_the_dit():
    report = same_as_host(dit(), CALL, input=CALL)
    assert [part.name for part in report.layers] == ["transformer_blocks.0.attn1", "transformer_blocks.1.attn1"]
    assert all(part.error < 1e-5 and part.tokens == 16 for part in report.layers)


@pytest.mark.parametrize("mixer", MIXERS)
def test_dit_converts(mixer):
    report = converts(dit(), mixer, CALL, input=CALL)
    assert {adapter.grid for adapter in report.adapters.values()} == {(4, 4)}
    survives(report.model, CALL, backend="eager" if mixer == "padre" else None)
    undoes(dit(), mixer, CALL)


def test_gradients_under_the_host_s_checkpointing_are_the_same():
    checkpoints(converts(dit(), "padre", CALL), CALL, lambda model: model.enable_gradient_checkpointing())


def test_latents_of_another_size():
    model = polymix.convert(dit(), "padre").model
    larger = {**CALL, "hidden_states": torch.randn(2, 4, 12, 12)}
    assert answer(model, larger)[0].shape == (2, 4, 12, 12)
    assert model.transformer_blocks[0].attn1.current_grid == (6, 6)


def test_the_host_s_processors_are_set_where_attention_is_left():
    model = pixart()
    model.set_attn_processor(AttnProcessor2_0())
    report = polymix.convert(model, "1:1", mixer="pom")
    assert list(model.attn_processors) == ["transformer_blocks.0.attn2.processor"]
    model.set_attn_processor(AttnProcessor())
    report.undo()
    assert [type(part) for part in model.attn_processors.values()] == [AttnProcessor2_0, AttnProcessor]


# A context


def test_pixart_with_softmax_is_the_pixart_with_captions_hidden_in_part():
    inputs = captioned()
    report = same_as_host(pixart(), inputs, input=inputs)
    assert [part.name for part in report.layers] == ["transformer_blocks.0.attn1", "transformer_blocks.0.attn2"]


@pytest.mark.parametrize("mixer", ["padre", "poly_nl"])
def test_pixart_converts_with_a_mixer_for_images_and_one_for_captions(mixer):
    inputs = captioned()
    plan = {"*.attn1": mixer, "*.attn2": "qt"}
    report = converts(pixart(), plan, inputs, input=inputs)
    assert report.adapters["transformer_blocks.0.attn1"].grid == (4, 4)
    assert report.adapters["transformer_blocks.0.attn2"].grid is None
    other = torch.where(KEPT[..., None] == 1, CONTEXT, 9.0)
    ignores(report.model, inputs, captioned(other))
    survives(report.model, inputs, backend=None)
    undoes(pixart(), plan, inputs)


def test_a_mixer_without_contexts_is_an_error():
    refuses(pixart(), "padre", CapabilityError, r"transformer_blocks.0.attn2 \(Attention\).*a separate context")


# Inside a U-Net


@UNET
def test_within_a_unet_with_softmax():
    inputs = {"hidden_states": torch.randn(2, 16, 4, 6), "encoder_hidden_states": CONTEXT}
    same_as_host(within_unet(), inputs, input=inputs)


@UNET
def test_within_a_unet_the_grid_is_that_of_the_feature_map():
    inputs = {"hidden_states": torch.randn(2, 16, 4, 6), "encoder_hidden_states": CONTEXT}
    plan = {"*.attn1": "padre", "*.attn2": "pom"}
    report = converts(within_unet(), plan, inputs, input=inputs)
    assert report.adapters["transformer_blocks.0.attn1"].grid == (4, 6)
    answer(report.model, {**inputs, "hidden_states": torch.randn(2, 16, 6, 2)})
    assert report.model.transformer_blocks[0].attn1.current_grid == (6, 2)
    refuses(within_unet(), plan, OptionError, "attn1 .*grid.*does not state")
    undoes(within_unet(), plan, inputs, input=inputs)


# The layer alone


@pytest.mark.parametrize(
    "options", [{"bias": True}, {"out_bias": False}, {"scale_qk": False}, {"dropout": 0.0}], ids=str
)
def test_options_of_the_layer(options):
    same_as_host(nn.Sequential(layer(**options)), X, tol=2e-5)


@pytest.mark.parametrize(
    "mask",
    [
        torch.tensor([[True] * 7, [True] * 4 + [False] * 3])[:, None],
        torch.zeros(2, 1, 7).masked_fill(torch.arange(7) > 4, -10000.0),
        torch.where(torch.ones(7, 7).tril().bool(), 0.0, -torch.inf).expand(2, -1, -1),
        torch.rand(2, 7, 7, generator=torch.Generator().manual_seed(0)) + torch.eye(7) > 0.5,
    ],
    ids=["padding", "scores", "past", "any"],
)
def test_masks_mean_what_they_meant(mask):
    inputs = {"hidden_states": X, "attention_mask": mask}
    same_as_host(layer(), inputs, input=inputs)
    report = polymix.convert(layer(), "softmax")
    if mask.shape[1] == 1:
        flat = {"hidden_states": X, "attention_mask": mask[:, 0]}
        identical(answer(report.model, flat), answer(report.model, inputs))


def test_masks_that_no_mixer_has_a_place_for_are_errors():
    model = polymix.convert(layer(), "softmax").model
    with pytest.raises(MaskError, match="more than hide"):
        model(X, attention_mask=torch.randn(2, 7, 7))
    with pytest.raises(ShapeError, match="All heads share one mask"):
        model(X, attention_mask=torch.ones(4, 7, 7, dtype=torch.bool))
    with pytest.raises(ShapeError, match="attention_mask"):
        model(X, attention_mask=torch.ones(2, 1, 9, dtype=torch.bool))


class Louder(nn.Linear):
    """What an adapter of weights puts in a linear map's place."""


def with_lora():
    module = layer()
    module.to_q = Louder(16, 16, bias=False)
    return module


@pytest.mark.parametrize(
    "options",
    [
        {"qk_norm": "layer_norm"}, {"norm_num_groups": 4}, {"added_kv_proj_dim": 16}, {"cross_attention_norm": "layer_norm"},
        {"residual_connection": True}, {"rescale_output_factor": 2.0}, {"cross_attention_dim": 8},
    ],
    ids=str,
)  # fmt: skip
def test_a_layer_that_does_more_runs_that_itself(options):
    """Norms, residual connections, grouped heads: the layer keeps them, and a mixer answers inside it."""
    inputs = {"hidden_states": X}
    if "cross_attention_dim" in options:
        inputs["encoder_hidden_states"] = torch.randn(2, 5, 8)
    report = same_as_host(nn.Sequential(Kept(layer(**options))), (inputs,), input=(inputs,))
    assert [type(part).__name__ for part in report.adapters.values()] == ["JointAdapter"]
    undoes(nn.Sequential(Kept(layer(**options))), "qt", (inputs,), input=(inputs,))


class Kept(nn.Module):
    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, inputs):
        return self.attention(**inputs)


def test_additions_to_the_weights_are_refused():
    refuses(nn.ModuleDict({"attn": with_lora()}), "pom", OptionError, "plan, for attn .*to_q, a Louder")


def test_arguments_for_other_processors_are_ignored_as_the_host_ignores_them():
    model = polymix.convert(layer(), "softmax").model
    identical([model(X, temb=torch.randn(2, 16))], [model(X)])
