"""GPT-2 and Llama, converted or not, as models of `polymix.models.language` that compute the same."""

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
from polymix.workflows.convert.inputs import has_language_model

_CURE = "Pass --keep-host, which saves the model in its own class."


class Family(NamedTuple):
    """A class of transformers: its layers, attention and activation, and what its other modules are called here."""

    model: Any
    blocks: str
    attention: str
    activation: str
    activations: tuple[str, ...]
    modules: dict[str, str]
    of_block: dict[str, str]

    def pairs(self, count: int) -> dict[str, str]:
        """Every module to copy: its name there and its name here."""
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
    """Turn a GPT2LMHeadModel or LlamaForCausalLM into a model of `polymix.models.language`.

    It computes the same, up to rounding. Any of its layers may have mixers; attention that was kept becomes `softmax`.

    Raises:
        OptionError: the model has a part that these classes do not have, such as another activation, or scaled rotary
            angles in attention that was kept.
        CapabilityError: a mixer is not recurrent.
    """
    if not has_language_model(host):
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
        got = f"{len(lost)} parameters that {type(model).__name__} does not have, such as {lost[0]}"
        raise OptionError("host", got, "parameters of attention, norms, feed-forward and embeddings", _CURE)
    for i, mixer in enumerate(mixers):
        model.model.blocks[i].mix.mixer = mixer  # the mixer itself: some buffers are not in the state dict
        state |= {f"model.blocks.{i}.mix.mixer.{key}": value for key, value in mixer.state_dict().items()}
    model.load_state_dict(state)
    model.tie_weights()
    model.generation_config = copy.deepcopy(host.generation_config)
    return model.train(host.training)


def _mixer(host: Any, place: str) -> TokenMixer:
    """A copy of the mixer in a layer; attention as a softmax mixer."""
    module = host.get_submodule(place)
    if isinstance(module, Adapter):
        causal = module.causal
        mixer = copy.deepcopy(module.mixer)
    else:
        kind = adapter_for(module)
        if kind is None:
            raise OptionError("host", f"{place}, a {type(module).__name__}", "attention of transformers", _CURE)
        attention = kind.describe(module, Host(host, place))
        causal, weight = attention.causal, next(module.parameters())
        maps = (attention.query, attention.key, attention.value, attention.out)
        bias = any(part is not None and part.bias is not None for part in maps)
        config = fitted(SoftmaxConfig(bias=bias), attention)
        mixer = config.build(attention.dim, device=weight.device, dtype=weight.dtype)
        for name, why in attention.drops.items():
            raise OptionError("host", f"{place} with {name}: {why}", "parts that the softmax mixer has", _CURE)
        if inherit(mixer, attention).keys() != dict(mixer.named_parameters()).keys():
            got = f"{place}, whose heads have another width"
            allowed = f"{attention.heads} heads that share {attention.dim} channels"
            raise OptionError("host", got, allowed, _CURE)
    if not causal:
        raise OptionError("host", f"{place}, which is not causal", "causal attention", _CURE)
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
    # positions="rotary" must not add angles to mixers that had none
    turned = all(
        config.for_heads(theirs.num_attention_heads).for_order().for_rotary(theta) == config for config in mixers
    )
    return PolymixLlamaConfig(
        intermediate_size=theirs.intermediate_size, norm_eps=theirs.rms_norm_eps, bias=theirs.mlp_bias,
        positions="rotary" if turned else "none", rope_theta=theta, **common,
    )  # fmt: skip


def _weights(host: Any, pairs: dict[str, str]) -> tuple[dict[str, Tensor], set[str]]:
    """The weights of the copied modules under their names here, and their parameter names in the host."""
    state: dict[str, Tensor] = {}
    placed: set[str] = set()
    for theirs, ours in pairs.items():
        module = host.get_submodule(theirs)
        for name, value in module.named_parameters(recurse=False):
            turned = type(module).__name__ == "Conv1D" and name == "weight"  # (in, out)
            state[f"{ours}.{name}"] = value.t() if turned else value
            placed.add(f"{theirs}.{name}")
    return state, placed
