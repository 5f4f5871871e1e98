"""Every transformer and U-Net of diffusers, as a small model of random weights, and inputs for it."""

from __future__ import annotations

import inspect
import itertools
import re
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polymix.compat import cure_torchvision

cure_torchvision()
import diffusers  # noqa: E402 (torchvision is cured first)

from .sizes import DEPTH, LARGEST, WIDTH  # noqa: E402

HEADS, SIDE, TEXT = 2, 8, 5
MODELS = re.compile(r"(?=\w*(Transformer|UNet|DiT|UVit))(?!\w*(Control|Multi|OnnxRuntime))\w+(Model|Transformer|UNet)$")
LAYERS = re.compile(r"(num|n)_\w*(layers|blocks)(_\w+)?$|depth$|layers_per_block$|num_res_blocks$")
TEXTS = ("joint_attention_dim", "cross_attention_dim", "cross_attention_input_dim", "caption_channels", "text_dim",
         "text_embed_dim", "cap_feat_dim", "context_in_dim", "encoder_hidden_size", "cond_token_dim")  # fmt: skip
BESIDE = ("ffn_dim", "cross_attention_dim_t5", "ffn_hidden_size", "text_embed_2_dim", "image_embed_dim", "text_in_dim",
          "text_encoder_dim", "image_proj_dim")  # fmt: skip
POOLED = ("pooled_projection_dim", "cond_embed_dim", "global_states_input_dim", "global_cond_dim")
WIDTHS = ("hidden_size", "dim", "inner_dim", "model_dim")
HEAD_COUNTS = ("num_attention_heads", "num_heads", "n_heads", "num_cross_attention_heads", "num_kv_heads", "n_kv_heads",
               "num_key_value_heads", "num_key_value_attention_heads")  # fmt: skip
# What some models refuse together with the rest.
WITHOUT = (
    ("guidance", "class_labels", "target_timestep", "timestep_r", "encoder_hidden_states_t5"),
    ("guidance", "class_labels", "target_timestep", "timestep_r", "encoder_hidden_states_t5", "image_embeds"),
    ("encoder_hidden_states", "class_labels", "added_cond_kwargs"),
)
# Values that fit no rule.
OPTIONS: dict[str, dict[str, Any]] = {
    "DiTTransformer2DModel": {"num_embeds_ada_norm": 4},
    "HunyuanDiT2DModel": {"in_channels": 4, "patch_size": 2, "text_len": TEXT, "text_len_t5": TEXT, "hidden_size": 176},
    "Transformer2DModel": {"in_channels": 32},
    "LatteTransformer3DModel": {
        "in_channels": 4,
        "patch_size": 2,
        "sample_size": SIDE,
        "caption_channels": WIDTH,
        "video_length": 3,
    },
    "CogVideoXTransformer3DModel": {
        "sample_width": SIDE,
        "sample_height": SIDE,
        "sample_frames": 9,
        "max_text_seq_length": TEXT,
    },
    "ChromaTransformer2DModel": {"approximator_hidden_dim": WIDTH, "approximator_layers": 1},
    "ConsisIDTransformer3DModel": {
        "sample_width": SIDE,
        "sample_height": SIDE,
        "sample_frames": 9,
        "max_text_seq_length": TEXT,
    },
    "CosmosTransformer3DModel": {"extra_pos_embed_type": None},
    "DreamLiteTransformer2DModel": {"in_channels": 32},
    "DreamLiteUNetModel": {"attention_head_dim": 8},
    "EasyAnimateTransformer3DModel": {"in_channels": 4, "out_channels": 4, "patch_size": 2, "mmdit_layers": DEPTH},
    "LTX2VideoTransformer3DModel": {
        "audio_num_attention_heads": HEADS,
        "audio_cross_attention_dim": HEADS * 64,
        "audio_in_channels": 128,
    },
    "StableAudio3DiTModel": {"embed_dim": 128, "num_memory_tokens": 4, "io_channels": 4, "local_add_cond_dim": 8},
    "TransformerTemporalModel": {"in_channels": 32},
    "UNet1DModel": {"extra_in_channels": 64, "sample_size": 16},
    "UNet3DConditionModel": {"attention_head_dim": 8},
    "UNetMotionModel": {"num_attention_heads": HEADS, "motion_num_attention_heads": HEADS},
    "UNetSpatioTemporalConditionModel": {"num_attention_heads": (HEADS,) * 4},
    "WanVACETransformer3DModel": {"vace_layers": [0, 1]},
    "UVit2DModel": {"vocab_size": 64, "codebook_size": 60, "num_attention_heads": HEADS, "hidden_size": 128},
}


def attention_class(kind: str) -> None:
    """None: a family is a whole model here."""


def left_out() -> dict[str, str]:
    """Nothing: what cannot be built here has a row that says so."""
    return {}


def kinds() -> list[str]:
    return [name for name in sorted(dir(diffusers)) if MODELS.match(name)]


def _small_options(kind: str, own: dict[str, Any]) -> dict[str, Any]:
    """Two heads and two layers; each head as wide as its own, for rotary angles are split over its channels."""
    heads = next((own[name] for name in HEAD_COUNTS if isinstance(own.get(name), int)), HEADS)
    head = own.get("attention_head_dim")
    inner = heads * head if isinstance(head, int) else 0
    options: dict[str, Any] = {}
    for name, value in own.items():
        number = isinstance(value, int) and not isinstance(value, bool)
        if LAYERS.match(name) and number:
            options[name] = min(value, DEPTH)
        elif name in HEAD_COUNTS and number:
            options[name] = HEADS
        elif number and inner and value == inner:
            options[name] = HEADS * head
        elif name in WIDTHS and number:
            options[name] = value // heads * HEADS
        elif (name in TEXTS or name in POOLED or name in BESIDE) and number:
            options[name] = WIDTH
        elif name == "cross_attention_head_dim" and number:
            options[name] = head
        elif name == "block_out_channels" and isinstance(value, (list, tuple)):
            options[name] = [WIDTH] * len(value)
    return {**options, **OPTIONS.get(kind, {})}


def candidates(kind: str) -> Iterator[nn.Module]:
    """A small model of a class."""
    of = getattr(diffusers, kind)
    own = {name: part.default for name, part in inspect.signature(of.__init__).parameters.items() if name != "self"}
    options = _small_options(kind, own)
    with torch.device("meta"):
        count = sum(p.numel() for p in of(**options).parameters())
    if count > LARGEST:
        raise ValueError(f"{count / 1e6:.0f} million parameters at its smallest")
    torch.manual_seed(0)
    yield of(**options).eval()


def inputs(model: Any) -> Iterator[dict[str, Any]]:
    """Noise as pictures, as a row of patches and as a film; a text, a time, and what else the model asks for."""
    config, drawn = model.config, torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=drawn)

    channels = config.get("in_channels") or config.get("io_channels") or 4
    text = next((config[name] for name in TEXTS if isinstance(config.get(name), int)), WIDTH)
    texts = dict.fromkeys([next((config[n] for n in ("caption_channels", "text_embed_dim", "cross_attention_input_dim")
                                 if isinstance(config.get(n), int)), text), text, WIDTH])  # fmt: skip
    pooled = next((config[name] for name in POOLED if isinstance(config.get(name), int)), WIDTH)
    axes = len(config.get("axes_dims_rope") or config.get("axes_dim") or (1, 1, 1))
    shapes = ((2, channels, SIDE, SIDE), (2, SIDE * 2, channels), (2, channels, 3, SIDE, SIDE), (2, channels, SIDE * 2),
              (2, 3, channels, SIDE, SIDE), (2, channels, SIDE * 8))  # fmt: skip
    takes = inspect.signature(model.forward).parameters
    for shape, width, whole in itertools.product(shapes, texts, (False, True)):
        time = torch.tensor([3, 7]) if whole else torch.tensor([0.3, 0.7])
        known = {
            **dict.fromkeys(("hidden_states", "sample", "x"), numbers(*shape)),
            **dict.fromkeys(("timestep", "t", "timesteps", "target_timestep", "r_timestep",
                             "timestep_r"), time),
            **dict.fromkeys(("encoder_hidden_states", "encoder_hidden_states_t5"), numbers(2, TEXT, width)),
            **dict.fromkeys(("pooled_projections", "pooled_text_emb", "text_embeds"), numbers(2, pooled)),
            **dict.fromkeys(("encoder_attention_mask", "encoder_hidden_states_mask", "text_embedding_mask",
                             "text_embedding_mask_t5"), torch.ones(2, TEXT, dtype=torch.bool)),
            "img_ids": torch.zeros(SIDE * 2, axes), "txt_ids": torch.zeros(TEXT, axes), "guidance": torch.ones(2),
            "class_labels": torch.tensor([0, 1]), "img_shapes": [[(1, 4, 4)]] * 2,
            "global_hidden_states": numbers(2, 1, pooled), "num_frames": 1, "height": 4, "width": 4,
            "input_ids": torch.zeros(2, SIDE, SIDE, dtype=torch.long), "micro_conds": torch.zeros(2, 5),
            "image_meta_size": torch.zeros(2, 6), "style": torch.zeros(2, dtype=torch.long),
            **dict.fromkeys(("original_size", "target_size", "crop_coords"), torch.full((2, 2), float(SIDE))),
            "padding_mask": torch.zeros(1, 1, SIDE, SIDE), "text_lens": torch.tensor([TEXT, TEXT - 1]),
            "text_bth": numbers(2, TEXT, config.get("text_in_dim") or WIDTH),
            "text_encoder_layers": [numbers(2, TEXT, config.get("text_encoder_dim") or WIDTH)] * 2 * DEPTH,
            "encoder_hidden_states_2": numbers(2, TEXT, config.get("text_embed_2_dim") or WIDTH),
            "encoder_attention_mask_2": torch.ones(2, TEXT, dtype=torch.bool), "indices_latents": torch.arange(3),
            "image_embeds": numbers(2, TEXT, config.get("image_embed_dim") or config.get("image_proj_dim") or WIDTH),
            "prior_token_id": torch.zeros(2, SIDE**2 // 4, dtype=torch.long),
            "prior_token_drop": torch.zeros(2, dtype=torch.bool), "added_time_ids": torch.ones(2, 3),
            "control_hidden_states": numbers(2, config.get("vace_in_channels") or 4, 3, SIDE, SIDE),
            "audio_hidden_states": numbers(2, SIDE * 2, config.get("audio_in_channels") or 4),
            "audio_encoder_hidden_states": numbers(2, TEXT, width), "audio_num_frames": SIDE * 2,
            "local_add_cond": numbers(2, config.get("local_add_cond_dim") or 4, SIDE * 2),
            "added_cond_kwargs": {"resolution": torch.ones(2, 2), "aspect_ratio": torch.ones(2, 1)},
        }  # fmt: skip
        example = {name: known[name] for name in takes if name in known}
        if "global_hidden_states" in example and "rotary_embedding" in takes:
            from diffusers.models.embeddings import get_1d_rotary_pos_embed

            rotary = config["attention_head_dim"] // 2
            example["rotary_embedding"] = get_1d_rotary_pos_embed(
                rotary, SIDE * 2 + 1, use_real=True, repeat_interleave_real=False
            )
        yield example
        for others in WITHOUT:
            yield {name: value for name, value in example.items() if name not in others}
