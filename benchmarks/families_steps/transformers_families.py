"""Every type of config that transformers registers, as a small model of random weights."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from polymix.compat import cure_torchvision
from polymix.convert.adapters.libraries import local_files

from .sizes import DEPTH, LARGEST, WIDTH

cure_torchvision()
import transformers  # noqa: E402 (torchvision is cured first)
from transformers.models.auto.configuration_auto import CONFIG_MAPPING  # noqa: E402

HEADS, INNER, TOKENS = 4, 48, 64
LAYERS = dict.fromkeys(
    ("num_hidden_layers", "num_layers", "n_layer", "n_layers", "encoder_layers", "decoder_layers", "num_decoder_layers",
     "num_encoder_layers", "depth", "depths", "num_blocks", "layers", "num_hidden_groups"), DEPTH)  # fmt: skip
NUMBERS = {
    **dict.fromkeys(("max_position_embeddings", "n_positions", "max_target_positions", "vocab_size",
                     "vocab_size_per_layer_input"), TOKENS),
    **dict.fromkeys(("max_length", "max_seq_len", "context_length", "block_size"), TOKENS),
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "backbone": "resnet18",
    "prediction_length": 4, "num_time_features": 1, "lags_sequence": [1, 2], "max_source_positions": 50,
}  # fmt: skip
PICTURES = {"image_size": 32, "patch_size": 8}
HEADS_NAMES = ("num_attention_heads", "n_head", "n_heads", "num_heads", "encoder_attention_heads",
               "decoder_attention_heads", "num_key_value_heads", "num_kv_heads")  # fmt: skip
# What a small config states, under every name that families have for it; only the names that a config has are set.
WIDTHS: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "d_model", "dim", "embed_dim", "n_embd", "emb_dim", "embedding_size"), WIDTH),
    **dict.fromkeys(HEADS_NAMES, HEADS),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "encoder_ffn_dim", "decoder_ffn_dim", "d_ff"), INNER),
    **dict.fromkeys(("ffn_hidden_size", "n_inner", "hidden_dim"), INNER),
    **dict.fromkeys(("num_key_value_heads", "num_kv_heads", "num_experts_per_tok", "top_k"), 2),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("head_dim", "d_kv", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim"), WIDTH // HEADS),
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size", "q_lora_rank", "kv_lora_rank"), 16),
    **dict.fromkeys(("mamba_d_state", "ssm_state_size", "state_size", "mamba_chunk_size", "chunk_size"), 8),
    **dict.fromkeys(("mamba_n_heads", "n_mamba_heads", "mamba_num_heads"), HEADS),
    "mamba_d_head": 2 * WIDTH // HEADS, "rotary_dim": 4, "num_mel_bins": 16, "projection_dim": WIDTH,
    "num_conv_pos_embeddings": 16, "num_conv_pos_embedding_groups": 4,
}  # fmt: skip
# Tried in order, until a model can be called: all of it, what it says of pictures or of widths left out, depth alone.
STEPS = (
    {**LAYERS, **NUMBERS, **WIDTHS, **PICTURES}, {**LAYERS, **NUMBERS, **WIDTHS},
    {**LAYERS, **NUMBERS, **PICTURES}, {**LAYERS, **NUMBERS}, LAYERS, {},
)  # fmt: skip
# Values that fit no rule.
OPTIONS: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gemma4_unified_assistant": {"num_kv_shared_layers": 0},
    "falcon_h1": {"mamba_d_ssm": 64},
    "granitemoehybrid": {"layer_types": ["linear_attention", "full_attention"]},
    "recurrent_gemma": {"num_hidden_layers": 3},
    "axk1": {"n_group": 2, "topk_group": 1},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "funnel": {"block_sizes": [1, 1]},
    "xmod": {"default_language": "en_XX"},
    "audio-spectrogram-transformer": {"max_length": 64, "patch_size": 16},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "levit": {"image_size": 64},
    "lilt": {"channel_shrink_ratio": 2},
    "zamba2": {"layers_block_type": ["mamba", "hybrid"]},
    "wav2vec2-bert": {"feature_projection_input_dim": 16},
}


FIRST = ("ForSpeechSeq2Seq", "ForSeq2SeqLM", "ForCausalLM", "")
OTHERS = [name.removeprefix("AutoModel") for name in dir(transformers) if name.startswith("AutoModelFor")]


def attention_class(kind: str) -> None:
    """None: a family is a config here, and none of its layers is meant."""


def left_out() -> dict[str, str]:
    """Nothing: what cannot be built here has a row that says so."""
    return {}


def kinds() -> list[str]:
    return sorted(CONFIG_MAPPING.keys())


def _fitted(name: str, value: Any, own: Any) -> Any:
    """A value of `STEPS` for an option: of as many stages as its own value has, which is kept where it is no number."""
    if name == "lags_sequence":
        return value
    if isinstance(own, (list, tuple)):
        if not all(isinstance(part, int) for part in own):
            return own
        if name in HEADS_NAMES:
            return [HEADS] * len(own)
        return [min(part, DEPTH) for part in own] if name in LAYERS else own
    return own if isinstance(own, (bool, dict)) or isinstance(own, str) != isinstance(value, str) else value


def _own(usual: Any, name: str) -> Any:
    """What a config says of an option; None where it says it layer by layer."""
    try:
        return getattr(usual, name, None)
    except Exception:  # of transformers, by no common class
        return None


def small_config(usual: Any, sizes: dict[str, Any]) -> Any:
    """A config with these sizes, and its own values beside them; parts with a config of their own are small too."""
    config_class = type(usual)
    stated, renamed = usual.to_dict(), getattr(config_class, "attribute_map", {})
    own = {name: _own(usual, name) for name in {**stated, **renamed}}
    options = {name: _fitted(name, value, own[name]) for name, value in sizes.items() if name in own}
    if "depths" in options and "image_size" in options:  # of several stages, each a half of the one before
        options["image_size"] = 64
        options.pop("patch_size", None)
    if isinstance(own.get("depths"), (list, tuple)):  # layers are stages there, whose lists stay whole
        options.pop("num_layers", None)
    elif "num_hidden_layers" in options or "num_layers" in options:
        options |= _cut(usual, stated)
    if getattr(usual, "sliding_window", None) and not getattr(usual, "layer_types", None) and sizes:
        options["sliding_window"] = None
    if "kv_lora_rank" in options and "num_key_value_heads" in options:  # latent attention has a key for every head
        options["num_key_value_heads"] = HEADS
    angles = own.get("rope_parameters")
    if (
        "head_dim" in sizes and isinstance(angles, dict) and "rope_theta" in angles
    ):  # of half a head: time, height, width
        half = int(WIDTH // HEADS * angles.get("partial_rotary_factor", 1)) // 2
        options["rope_parameters"] = {**angles, "mrope_section": [half - half // 3 * 2, half // 3, half // 3]}
    for name in getattr(usual, "sub_configs", {}):
        if getattr(getattr(usual, name, None), "model_type", "") in CONFIG_MAPPING:
            options[name] = small_config(getattr(usual, name), sizes)
    if sizes:
        options |= OPTIONS.get(usual.model_type, {})
    under_another_name = {renamed.get(name) for name in options}
    given = {name: value for name, value in _diff(usual).items() if name not in under_another_name} | options
    for _ in range(len(options) + 1):
        try:
            return config_class(**given)
        except Exception as error:  # a name that means something else in this family: its own value stays
            named = [name for name in options if f"'{name}'" in str(error) and name in given]
            given.pop(named[0] if named else "head_dim", None)
    return usual


def _diff(usual: Any) -> dict[str, Any]:
    """What a config states beside the values of its class, such as what a model says of its parts."""
    usual_parts, skipped = getattr(usual, "sub_configs", {}), ("model_type", "transformers_version", "architectures")
    return {k: v for k, v in usual.to_diff_dict().items() if k not in usual_parts and k not in skipped}


def _cut(usual: Any, stated: dict[str, Any]) -> dict[str, Any]:
    """The lists with an entry for each layer, cut to one layer of each kind, at least two."""
    count = getattr(usual, "num_hidden_layers", None) or getattr(usual, "num_layers", None)
    types = getattr(usual, "layer_types", None) or getattr(usual, "layers_block_type", None) or [""] * (count or 0)
    if not isinstance(count, int) or len(types) != count:
        return {}
    places = sorted({types.index(kind) for kind in types})
    places += [place for place in reversed(range(count)) if place not in places][: max(0, DEPTH - len(places))]
    lists = {k: v for k, v in stated.items() if isinstance(v, (list, tuple)) and len(v) == count and k != "depths"}
    cut = {name: [value[place] for place in places] for name, value in lists.items()}
    named = "num_hidden_layers" if "num_hidden_layers" in stated else "num_layers"
    return {**cut, named: len(places)} if named in stated else cut


def _classes(config: Any) -> Iterator[Any]:
    """The classes of models of a config, with a language head where there is one."""
    for name in (*FIRST, *OTHERS):
        auto = getattr(transformers, f"AutoModel{name}")
        if type(config) in (auto._model_mapping or ()):
            yield auto


def candidates(kind: str) -> Iterator[nn.Module]:
    """Small models of a family, from the smallest to that of its usual sizes where that is small itself."""
    usual = CONFIG_MAPPING[kind]()
    failure: Exception = ValueError("no class of models")
    done: list[str] = []
    for sizes in STEPS:
        try:
            config = small_config(usual, sizes)
            auto = next(_classes(config), None)
            if auto is None or (text := config.to_json_string()) in done:
                continue
            done.append(text)
            if "hidden_size" not in sizes:
                with torch.device("meta"), local_files():
                    count = sum(p.numel() for p in auto.from_config(config).parameters())
                if count > LARGEST:
                    raise ValueError(f"{count / 1e6:.0f} million parameters at its smallest")
            torch.manual_seed(0)
            with local_files():
                yield auto.from_config(small_config(usual, sizes)).eval()
        except Exception as error:
            failure = failure if done and "no class" not in str(failure) else error
    raise failure
