"""GPT-2 and Llama, converted or not, as the language models of ours: the same function in other classes."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.convert.adapter import Adapter, Host, adapter_for
from polymix.convert.convert import fitted
from polymix.convert.inherit import inherit
from polymix.errors import CapabilityError, OptionError
from polymix.mixers import MixerConfig, SoftmaxConfig, TokenMixer
from polymix.models.language import (
    PolymixForCausalLM,
    PolymixGPTConfig,
    PolymixGPTForCausalLM,
    PolymixLlamaConfig,
    PolymixLlamaForCausalLM,
)
from polymix.workflows.convert.inputs import has_twin

_CURE = "Pass --keep-host: polymix.save_pretrained keeps the host as it is."


class Family(NamedTuple):
    """Where a host has its layers, attention and activation, and what its other modules are called here."""

    model: Any
    blocks: str
    attention: str
    activation: str
    activations: tuple[str, ...]
    modules: dict[str, str]
    of_block: dict[str, str]

    def pairs(self, count: int) -> dict[str, str]:
        """Every module that is copied, theirs to ours."""
        each = {
            f"{self.blocks}.{i}.{theirs}": f"model.blocks.{i}.{ours}"
            for i in range(count) for theirs, ours in self.of_block.items()
        }  # fmt: skip
        return {**self.modules, **each}


FAMILIES = {
    "GPT2LMHeadModel": Family(
        PolymixGPTForCausalLM, "transformer.h", "attn", "activation_function", ("gelu_new", "gelu_pytorch_tanh"),
        {"transformer.wte": "model.embed", "transformer.wpe": "model.position", "transformer.ln_f": "model.norm",
         "lm_head": "lm_head"},
        {"ln_1": "norm1", "ln_2": "norm2", "mlp.c_fc": "mlp.up", "mlp.c_proj": "mlp.down"},
    ),
    "LlamaForCausalLM": Family(
        PolymixLlamaForCausalLM, "model.layers", "self_attn", "hidden_act", ("silu", "swish"),
        {"model.embed_tokens": "model.embed", "model.norm": "model.norm", "lm_head": "lm_head"},
        {"input_layernorm": "norm1", "post_attention_layernorm": "norm2", "mlp.gate_proj": "mlp.gate",
         "mlp.up_proj": "mlp.up", "mlp.down_proj": "mlp.down"},
    ),
}  # fmt: skip


@torch.no_grad()
def repackage(host: Any) -> PolymixForCausalLM:
    """A GPT2LMHeadModel or LlamaForCausalLM with mixers in some of its layers, or none, as a model of
    `polymix.models.language` that computes the same, to rounding; attention that was kept becomes `softmax`.

    Raises:
        OptionError: a part of the host has no place in our classes, such as scaled rotary angles in attention that is
            kept, or another activation.
        CapabilityError: a mixer is not recurrent, which a layer of these models must be.
    """
    if not has_twin(host):
        raise OptionError("host", type(host).__name__, " or ".join(FAMILIES), _CURE)
    family, theirs = FAMILIES[type(host).__name__], host.config
    if getattr(theirs, family.activation) not in family.activations:
        got = f"the activation {getattr(theirs, family.activation)!r}"
        raise OptionError(family.activation, got, " or ".join(map(repr, family.activations)), _CURE)
    places = [f"{family.blocks}.{i}.{family.attention}" for i in range(theirs.num_hidden_layers)]
    mixers = [_mixer(host, place) for place in places]
    weight = host.get_input_embeddings().weight
    tied = host.get_output_embeddings().weight is weight
    try:
        model = family.model(_config(host, [mixer.config for mixer in mixers], tied)).to(weight.device, weight.dtype)
    except CapabilityError as error:
        raise CapabilityError(error.argument, error.got, error.allowed, _CURE) from error
    state, placed = _weights(host, family.pairs(len(mixers)))
    lost = [name for name, _ in host.named_parameters() if name not in placed and not name.startswith(tuple(places))]
    if lost:
        got = f"{len(lost)} parameters without a place in {type(model).__name__}, such as {lost[0]}"
        raise OptionError("host", got, "those of attention, norms, feed-forward and embeddings", _CURE)
    for i, mixer in enumerate(mixers):
        model.model.blocks[i].mix.mixer = mixer  # itself: in its buffers are numbers that no state dict has
        state |= {f"model.blocks.{i}.mix.mixer.{key}": value for key, value in mixer.state_dict().items()}
    model.load_state_dict(state)
    model.tie_weights()
    model.generation_config = copy.deepcopy(host.generation_config)
    return model.train(host.training)


def _mixer(host: Any, place: str) -> TokenMixer:
    """A copy of the mixer that stands in a layer, or attention as one."""
    module = host.get_submodule(place)
    if isinstance(module, Adapter):
        causal = module.causal
        mixer = copy.deepcopy(module.mixer)
    else:
        kind = adapter_for(module)
        if kind is None:
            raise OptionError("host", f"{place}, a {type(module).__name__}", "attention as transformers has it", _CURE)
        attention = kind.describe(module, Host(host, place))
        causal, weight = attention.causal, next(module.parameters())
        maps = (attention.query, attention.key, attention.value, attention.out)
        bias = any(part is not None and part.bias is not None for part in maps)
        config = fitted(SoftmaxConfig(bias=bias), attention)
        mixer = config.build(attention.dim, device=weight.device, dtype=weight.dtype)
        for name, why in attention.drops.items():
            raise OptionError("host", f"{place} with {name}: {why}", "positions that softmax has", _CURE)
        if inherit(mixer, attention).keys() != dict(mixer.named_parameters()).keys():
            got = f"{place}, whose heads are not its {attention.dim} channels over {attention.heads}"
            raise OptionError("host", got, "heads as wide as their share", _CURE)
    if not causal:
        raise OptionError("host", f"{place}, which is not causal", "attention to the past alone", _CURE)
    return mixer.train(module.training)


def _config(host: Any, mixers: list[MixerConfig], tied: bool) -> Any:
    theirs = host.config
    ends = ("bos_token_id", "eos_token_id", "pad_token_id")
    common: dict[str, Any] = {name: getattr(theirs, name, None) for name in ends} | {
        "vocab_size": theirs.vocab_size, "hidden_size": theirs.hidden_size, "num_layers": theirs.num_hidden_layers,
        "num_heads": theirs.num_attention_heads, "max_position_embeddings": theirs.max_position_embeddings,
        "mixers": mixers, "tie_word_embeddings": tied, "initializer_range": theirs.initializer_range,
    }  # fmt: skip
    if type(host).__name__ == "GPT2LMHeadModel":
        size = theirs.n_inner or 4 * theirs.hidden_size
        return PolymixGPTConfig(
            intermediate_size=size, norm_eps=theirs.layer_norm_epsilon, dropout=theirs.resid_pdrop, **common
        )
    bases = (config.rotary_base for config in mixers)
    theta = next((base for base in bases if base is not None), 1e4)
    # "rotary" would turn mixers that stood in the host without angles
    turned = all(
        config.for_heads(theirs.num_attention_heads).for_order().for_rotary(theta) == config for config in mixers
    )
    return PolymixLlamaConfig(
        intermediate_size=theirs.intermediate_size, norm_eps=theirs.rms_norm_eps, bias=theirs.mlp_bias,
        positions="rotary" if turned else "none", rope_theta=theta, **common,
    )  # fmt: skip


def _weights(host: Any, pairs: dict[str, str]) -> tuple[dict[str, Tensor], set[str]]:
    """The weights of modules by our names, and which of the host's parameters they are."""
    state: dict[str, Tensor] = {}
    placed: set[str] = set()
    for theirs, ours in pairs.items():
        module = host.get_submodule(theirs)
        for name, value in module.named_parameters(recurse=False):
            turned = type(module).__name__ == "Conv1D" and name == "weight"  # (in, out)
            state[f"{ours}.{name}"] = value.t() if turned else value
            placed.add(f"{theirs}.{name}")
    return state, placed
