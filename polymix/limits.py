"""What fits into this machine: models and inputs are sized before anything is allocated."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.overrides import TorchFunctionMode

from polymix.errors import MAX_TOKENS as LONGEST
from polymix.errors import OptionError, PolymixError

__all__ = [
    "LAYERS", "LIMITS", "LONGEST", "Unfilled", "bounded", "check_counts", "check_memory", "check_model", "memory_of",
    "too_large",
]  # fmt: skip
MODULES = 200_000  # of one model; the largest open models have about half
LAYERS = 10_000
WIDTH = 2**24  # the weights from one such width to another are a petabyte, and still a number of 64 bits
_FILLS = {"normal_", "uniform_", "fill_", "zero_", "copy_", "mul_", "add_", "sub_", "div_", "clamp_", "erfinv_"}
# What PyTorch and NumPy say, as RuntimeError, TypeError or ValueError, of a size that cannot be allocated or has over
# 64 bits; they have no type of error for it.
_TOO_LARGE = (
    "can't allocate memory", "not enough memory", "Storage size calculation overflowed",
    "integer multiplication overflow", "Overflow when unpacking long", "without overflow", "negative dimension",
    "invalid shape dimension", "array is too big", "Maximum allowed dimension exceeded",
)  # fmt: skip

# The largest number for keys of the configs that transformers, diffusers and timm save, and of our own.
_LAYER_KEYS = """
    aligner_num_add_layers blocks_per_stage c2f_num_blocks cls_attn_layers csp_num_blocks decoder_layers
    decoder_layers_per_block decoder_num_hidden_layers decoder_num_layers decoder_stage_depths depth depth_list
    depth_separable_num_layers depth_token_only depths dit_depth duration_predictor_layers enc_num_blocks
    enc_num_layers encode_proj_layers encoder_layers encoder_layers_per_block encoder_num_hidden_layers
    encoder_transformer_depths energy_predictor_layers iou_head_depth kernel_predictor_num_blocks l_layers layers
    layers_per_block layers_per_down_block layers_per_up_block lqe_layers memory_attention_num_layers
    memory_fuser_num_layers mid_block_layers mit_num_hidden_layers mmdit_layers motion_layers_per_block
    n_attn_blocks n_layer n_layers n_refiner_layers nlayers num_adapter_layers num_attention_layers
    num_auxiliary_layers num_blocks num_condition_layers num_conv_layers num_dec_blocks num_decoder_blocks
    num_decoder_layers num_dense_layers num_enc_blocks num_encoder_blocks num_encoder_layers num_feat_extract_layers
    num_fov_head_layers num_global_layers num_hidden_layers num_kv_shared_layers num_layers num_lstm_layers
    num_mel_attn_blocks num_mem_blocks num_mid_blocks num_mid_layers num_mmdit_layers num_nextn_predict_layers
    num_pooler_layers num_post_blocks num_pre_blocks num_refiner_layers num_res_blocks num_residual_layers
    num_rnn_layers num_self_attends_per_block num_single_dit_layers num_single_layers num_spatial_layers num_stages
    num_temporal_layers num_text_blocks num_text_layers num_timestamp_prediction_layers num_upsampling_stages
    num_visual_blocks parallel_depth perceiver_num_layers perceiver_resampler_num_layers pitch_predictor_layers
    posterior_encoder_num_wavenet_layers pred_num_hidden_layers prior_encoder_num_wavenet_layers prompt_layers
    query_dec_layers r_layers resampler_depth reverse_transformer_layers_per_block serial_depths
    speech_decoder_postnet_layers speech_decoder_prenet_layers speech_encoder_layers stage_num_blocks
    stage_numb_of_layers t2u_decoder_layers t2u_encoder_layers temporal_transformer_layers_per_block
    text_encoder_num_layers text_encoder_proj_layers transformer_depths transformer_layers_per_block
    transformer_num_layers x_layers
"""
_WIDTH_KEYS = """
    attention_head_dim attention_head_size attention_heads block_out_channels caption_channels channels
    cross_attention_dim cross_attention_hidden_size d_ff d_head d_inner d_kv d_model decoder_attention_heads
    decoder_block_out_channels decoder_ffn_dim decoder_hidden_size dim dim_feedforward dims embed_dim embed_dims
    embedding_dim embedding_size encoder_attention_heads encoder_block_out_channels encoder_ffn_dim
    encoder_hidden_size ffn_dim ffn_hidden_size head_dim head_hidden_size head_widths heads hidden_dim hidden_size
    hidden_sizes in_channels in_chans intermediate_size joint_attention_dim kv_lora_rank latent_channels mlp_dim
    moe_intermediate_size n_embd n_head n_heads n_inner n_routed_experts num_attention_heads num_channels num_classes
    num_experts num_features num_heads num_key_value_heads num_kv_heads num_labels num_local_experts out_channels
    pooled_projection_dim projection_dim q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim
    shared_expert_intermediate_size text_embed_dim v_head_dim width widths
"""
_LENGTH_KEYS = """
    max_2d_position_embeddings max_decoder_position_embeddings max_encoder_position_embeddings max_position_embeddings
    max_source_positions max_target_positions n_ctx n_positions num_embeddings num_position_embeddings
    original_max_position_embeddings relative_attention_num_buckets text_vocab_size type_vocab_size vocab_size
"""
LIMITS = {
    **dict.fromkeys(_LAYER_KEYS.split(), LAYERS), **dict.fromkeys(_WIDTH_KEYS.split(), WIDTH),
    **dict.fromkeys(_LENGTH_KEYS.split(), LONGEST),
}  # fmt: skip


class Unfilled(TorchFunctionMode):
    """Skip the initialisation of parameters, which saved weights will replace or nobody will read."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        target = args[0] if args else kwargs.get("tensor")
        fills = getattr(func, "__module__", None) == "torch.nn.init" or getattr(func, "__name__", None) in _FILLS
        return target if fills and isinstance(target, nn.Parameter) else func(*args, **kwargs)


def memory_of(device: str = "cpu") -> int:
    """Bytes of memory of a device; on the CPU the machine's memory, or the limit of its container."""
    if device.startswith("cuda"):
        return int(torch.cuda.get_device_properties(device).total_memory)
    sizes = [os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")] if hasattr(os, "sysconf") else [1 << 40]
    for limit in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            sizes.append(int(Path(limit).read_text()))
        except (OSError, ValueError):  # no such limit
            continue
    return min(sizes)


def check_memory(argument: str, what: str, size: float, device: str = "cpu", cure: str = "Use smaller sizes.") -> None:
    """Raise OptionError if `what`, of `size` bytes, does not fit into the memory of the device."""
    there = memory_of(device)
    if size > there:
        allowed = f"at most the {there / 2**30:,.1f} GiB of memory of this machine"
        raise OptionError(argument, f"{what}, which needs {size / 2**30:,.1f} GiB", allowed, cure)


def too_large(error: BaseException) -> bool:
    """Whether an error says that a size does not fit into memory, or not into 64 bits."""
    if isinstance(error, (MemoryError, OverflowError, torch.OutOfMemoryError)):
        return True
    return any(words in str(error) for words in _TOO_LARGE)


@contextmanager
def bounded(argument: str, what: str, cure: str = "Use smaller sizes.") -> Iterator[list[int]]:
    """Stop a model that is being built once it is larger than the machine's memory, or has more than 200,000 modules.

    Yields a list whose only entry is the size of its tensors so far, in bytes.

    Raises:
        OptionError: about `argument`, with both sizes.
    """
    there, held, modules = memory_of(), [0], 0

    def add(module: nn.Module, name: str, tensor: Any) -> None:
        if isinstance(tensor, torch.Tensor):
            held[0] += tensor.numel() * tensor.element_size()
            if held[0] > there:
                check_memory(argument, what, held[0], cure=cure)

    def count(module: nn.Module, name: str, child: Any) -> None:
        nonlocal modules
        modules += 1
        if modules > MODULES:
            raise OptionError(argument, f"{what} with over {MODULES:,} modules", f"at most {MODULES:,} modules", cure)

    hooks = [
        register_module_parameter_registration_hook(add), register_module_buffer_registration_hook(add),
        register_module_module_registration_hook(count),
    ]  # fmt: skip
    try:
        yield held
    except (RuntimeError, TypeError, ValueError, OverflowError, MemoryError) as error:
        if isinstance(error, PolymixError) or not too_large(error):
            raise
        allowed = f"at most the {there / 2**30:,.1f} GiB of memory of this machine"
        raise OptionError(argument, f"{what}, which cannot be allocated", allowed, cure) from error
    finally:
        for hook in hooks:
            hook.remove()


def check_model(build: Callable[[], Any], argument: str, what: str, cure: str = "Use smaller sizes.") -> int:
    """Raise OptionError if the model that `build` returns does not fit into this machine's memory.

    It is built on the meta device, so that nothing is allocated. Some models cannot be built there; for them, and for
    all other errors, the caller's own call of `build`, inside of `bounded`, decides.

    Returns:
        the bytes of its parameters and buffers.
    """
    with bounded(argument, what, cure) as held, torch.device("meta"), Unfilled():
        try:
            build()
        except ImportError:  # some of PyTorch's formulas for the meta device need NumPy
            pass
        except RuntimeError as error:
            if not re.search("meta|item", str(error), re.IGNORECASE):
                raise
    return held[0]


def check_counts(content: Any, argument: str, what: str, name: str = "") -> None:
    """Raise OptionError if a number in a model's config cannot be meant, such as over 10,000 layers.

    Configs make lists of this length before a model is built. Keys that are not in `LIMITS` are not limited.

    Args:
        content: the config as JSON has it.
    """
    if isinstance(content, Mapping):
        for key, value in content.items():
            check_counts(value, argument, what, str(key))
    elif isinstance(content, (list, tuple)):
        for value in content:
            check_counts(value, argument, what, name)
    elif isinstance(content, int) and abs(content) > LIMITS.get(name, math.inf):
        got = f"{what}, with {name}={content:,}"
        raise OptionError(argument, got, f"{name} of at most {LIMITS[name]:,}", "Fetch or save it again.")
