"""The models: embeddings, blocks, a norm and a head, as PreTrainedModels of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin, PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from polymix.errors import OptionError, ShapeError
from polymix.files import write_whole
from polymix.mixers import SoftmaxMixer
from polymix.models.language.config import PolymixConfig, PolymixGPTConfig, PolymixLlamaConfig
from polymix.models.language.layers import FAMILIES, CausalLayer, LanguageBlock, Mlp, SwiGLU, mixers_of
from polymix.models.language.layout import SequenceLayout, sequence_layout, tokens_in
from polymix.structured.dense import apply_linear

AUTO = "polymix_auto"  # the module in a saved folder that imports polymix for transformers


class PolymixPreTrainedModel(PreTrainedModel):
    """What all models share: initialisation, saving, and the flags that transformers reads."""

    config_class: Any = PolymixConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["LanguageBlock"]  # noqa: RUF012  # FSDP and accelerate wrap these
    _skip_keys_device_placement = ["past_key_values"]  # noqa: RUF012
    _can_compile_fullgraph = False

    @property
    def _is_stateful(self) -> bool:  # type: ignore[override]
        """Whether the cache cannot drop tokens, which assisted generation requires."""
        return not all(isinstance(mixer, SoftmaxMixer) for mixer in mixers_of(self))

    def _init_weights(self, module: nn.Module) -> None:
        """Initialise all but the mixers, which did it themselves, or are filled if they were made without storage."""
        if isinstance(module, CausalLayer):
            fill(module)
        elif isinstance(module, (nn.Embedding, Mlp, SwiGLU)) or module is getattr(self, "lm_head", None):
            for part in module.modules():
                if isinstance(part, (nn.Embedding, nn.Linear)):
                    shrink = (2 * self.config.num_layers) ** -0.5 if part is getattr(module, "down", None) else 1.0
                    self._normal(part, self.config.initializer_range * shrink)
        elif isinstance(module, LanguageBlock):
            self._ones(module.norm1)
            self._ones(module.norm2)
        elif module is getattr(self, "norm", None):
            self._ones(module)

    @classmethod
    def is_custom_code(cls) -> bool:
        """False: otherwise transformers would not pass modules without parameters of their own to `_init_weights`."""
        return False

    @staticmethod
    def _normal(part: nn.Module, std: float) -> None:
        for name, tensor in missing(part):
            nn.init.zeros_(tensor) if name == "bias" else nn.init.normal_(tensor, std=std)

    @staticmethod
    def _ones(norm: nn.Module) -> None:
        for name, tensor in missing(norm):
            nn.init.constant_(tensor, float(name != "bias"))

    def save_pretrained(self, save_directory: Any, **options: Any) -> Any:  # type: ignore[override]
        """Save as transformers does, with the mixers that the layers have now.

        If polymix.models.language has not been imported, the folder loads with `trust_remote_code`.
        """
        names = type(self).__name__.removesuffix("ForCausalLM").removesuffix("Model")
        self.config.mixers = [mixer.config.to_dict() for mixer in mixers_of(self)]
        self.config.auto_map = {
            "AutoConfig": f"{AUTO}.{names}Config", "AutoModel": f"{AUTO}.{names}Model",
            "AutoModelForCausalLM": f"{AUTO}.{names}ForCausalLM",
        }  # fmt: skip
        saved = super().save_pretrained(save_directory, **options)
        text = f"from polymix.models.language import {names}Config, {names}ForCausalLM, {names}Model  # noqa: F401\n"
        write_whole(Path(save_directory) / f"{AUTO}.py", text)
        return saved


def on_meta(model: nn.Module) -> None:
    """Mark the layers that were made without storage, whose initialisation therefore had no effect."""
    for module in model.modules():
        if isinstance(module, CausalLayer):
            module.unfilled = any(parameter.is_meta for parameter in module.parameters())


@torch.no_grad()
def fill(layer: CausalLayer) -> None:
    """Give what no checkpoint filled, such as buffers that are not saved, the values of a fresh layer."""
    if not layer.unfilled:
        return
    like = next(layer.parameters())
    fresh = layer.again(device=like.device, dtype=like.dtype)
    made: dict[str, Tensor] = {**dict(fresh.named_parameters()), **dict(fresh.named_buffers())}
    for name, tensor in missing(layer):
        tensor.copy_(made[name])
    layer.unfilled = False


def missing(module: nn.Module) -> list[tuple[str, Tensor]]:
    """Parameters and buffers that no checkpoint has filled."""
    tensors = (*module.named_parameters(), *module.named_buffers())
    return [(name, tensor) for name, tensor in tensors if not getattr(tensor, "_is_hf_initialized", False)]


def _readable(ids: Tensor) -> bool:
    """Whether the ids can be read now: not while a graph is recorded, and not on a GPU, for which that would wait."""
    recorded = torch.compiler.is_compiling() or torch._C._get_tracing_state() is not None or type(ids) is not Tensor
    return not recorded and ids.device.type == "cpu" and ids.numel() > 0


def _said(value: Any) -> str:
    """A tensor's shape and type, or the type of anything else."""
    return f"{tuple(value.shape)} of {value.dtype}" if isinstance(value, Tensor) else type(value).__name__


class PolymixModel(PolymixPreTrainedModel):
    """input_ids (B, N) -> last_hidden_state (B, N, hidden_size).

    Cost in N: that of the mixers, linear except for softmax. See `PolymixForCausalLM` for the arguments.
    """

    def __init__(self, config: PolymixConfig) -> None:
        super().__init__(config)
        self.embed = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.position = nn.Embedding(config.max_position_embeddings, config.hidden_size) if learned else None
        self.drop = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(
            LanguageBlock(config, mixer, index) for index, mixer in enumerate(config.layer_configs())
        )
        self.norm = FAMILIES[config.model_type][0](config.hidden_size, eps=config.norm_eps)
        self.gradient_checkpointing = False
        on_meta(self)
        self.post_init()

    def get_input_embeddings(self) -> nn.Module:
        return self.embed

    def set_input_embeddings(self, value: Any) -> None:
        self.embed = value

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, inputs_embeds: Tensor | None = None, use_cache: bool | None = None,
        segment_ids: Tensor | None = None, output_hidden_states: bool | None = None, return_dict: bool | None = None,
        **other: Any,
    ) -> Any:  # fmt: skip
        if other.get("output_attentions"):
            raise OptionError("output_attentions", True, "False: a mixer has no attention scores", "Leave it out.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("input_ids", "both or neither of input_ids and inputs_embeds", "one", "Pass one of them.")
        self._check_tokens(input_ids, inputs_embeds)
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        packed = segment_ids is not None
        caching = (self.config.use_cache and not self.training and not packed) if use_cache is None else use_cache
        cached = past_key_values is not None or bool(use_cache)
        past = tokens_in(past_key_values, len(self.blocks), x.shape[0])
        layout = sequence_layout(x, attention_mask, position_ids, segment_ids, past, cached)
        if caching and past_key_values is None and layout.segments is None:
            past_key_values = DynamicCache()
        if self.position is not None:
            self._check_learned(layout, position_ids)
            x = x + self.position(layout.place)
        x = self.drop(x)
        shown = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: tuple[Tensor, ...] = ()
        for block in self.blocks:
            states = (*states, x) if shown else ()
            x = block(x, layout, past_key_values=past_key_values)
        x = self.norm(x)
        out = BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=past_key_values, hidden_states=(*states, x) if shown else None
        )
        return out.to_tuple() if return_dict is False else out

    def _check_tokens(self, ids: Any, embeddings: Any) -> None:
        """ShapeError unless ids (B, N) are integers in the vocabulary, or embeddings are (B, N, hidden_size)."""
        if embeddings is not None:
            width = self.config.hidden_size
            if not isinstance(embeddings, Tensor) or embeddings.ndim != 3 or embeddings.shape[-1] != width:
                raise ShapeError("inputs_embeds", _said(embeddings), f"(B, N, {width})", "Pass one vector per token.")
            return
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.dtype not in (torch.int64, torch.int32):
            cure = "Pass what the tokenizer returns, as int64."
            raise ShapeError("input_ids", _said(ids), "token ids (B, N) of int64 or int32", cure)
        if not _readable(ids):
            return
        low, high = (int(value) for value in ids.aminmax())
        if low < 0 or high >= self.embed.num_embeddings:
            got = f"id {low if low < 0 else high}"
            cure = "Use the model's own tokenizer, and 0 or any other token for padding."
            raise ShapeError("input_ids", got, f"ids from 0 to {self.embed.num_embeddings - 1}, the vocabulary", cure)

    def _check_learned(self, layout: SequenceLayout, position_ids: Tensor | None) -> None:
        """ShapeError unless every position has a vector. The positions are read only if counting is not enough."""
        there, counted = self.config.max_position_embeddings, layout.past + layout.place.shape[1]
        if torch.compiler.is_compiling() or (position_ids is None and counted <= there):
            return
        highest = int(layout.place.max())
        if highest >= there:
            cure = 'Shorten the input, use positions="rotary" or "none", or extend them with polymix convert.'
            raise ShapeError("input_ids", f"position {highest}", f"less than max_position_embeddings={there}", cure)


class PolymixForCausalLM(PolymixPreTrainedModel, GenerationMixin):
    """A language model. Use `PolymixGPTForCausalLM` or `PolymixLlamaForCausalLM`.

        X = E[ids] + P[place];   X ← block(X), L times;   logits = norm(X) W

    forward takes the arguments of every causal model of transformers, and segment_ids (B, N), which keep packed
    sequences apart (as do position ids that start again). attention_mask (B, tokens so far) marks padding, on either
    side, which has no influence. past_key_values holds a state per layer, whose size does not depend on N (softmax
    layers: keys and values). It is returned outside training, and can be reordered for beams, but not cropped. labels
    (B, N) are shifted here; -100 is ignored. logits_to_keep: return the logits of the last tokens only.

    Raises:
        ShapeError, MaskError, StateError: ids, masks or caches do not fit; before a layer runs.
    Cost in N: that of the mixers, linear except for softmax. With a cache, a token costs the same at any length.
    Source: the language models of the PoM paper (GPT2 and GPPoM² with a pattern of mixers).
    """

    _tied_weights_keys = {"lm_head.weight": "model.embed.weight"}  # noqa: RUF012
    base_class: Any = PolymixModel

    def __init__(self, config: PolymixConfig) -> None:
        super().__init__(config)
        self.model = self.base_class(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head

    def set_output_embeddings(self, value: Any) -> None:
        self.lm_head = value

    def forward(
        self, input_ids: Tensor | None = None, attention_mask: Tensor | None = None, position_ids: Tensor | None = None,
        past_key_values: Any = None, inputs_embeds: Tensor | None = None, labels: Tensor | None = None,
        use_cache: bool | None = None, segment_ids: Tensor | None = None, logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None, return_dict: bool | None = None, **other: Any,
    ) -> Any:  # fmt: skip
        if labels is not None:
            self._check_labels(labels, input_ids if inputs_embeds is None else inputs_embeds)
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, segment_ids,
            output_hidden_states, output_attentions=other.pop("output_attentions", None),
        )  # fmt: skip
        positions = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = apply_linear(self.lm_head, out.last_hidden_state[:, positions])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **other)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return result.to_tuple() if return_dict is False else result

    def _check_labels(self, labels: Any, tokens: Any) -> None:
        """ShapeError unless labels (B, N) are ids in the vocabulary or -100."""
        shape = tuple(tokens.shape[:2]) if isinstance(tokens, Tensor) else ("B", "N")
        if not isinstance(labels, Tensor) or tuple(labels.shape) != shape or labels.dtype != torch.int64:
            cure = "They are shifted by the model: pass a copy of input_ids."
            raise ShapeError("labels", _said(labels), f"ids {shape} of int64, as input_ids", cure)
        if not _readable(labels):
            return
        wrong = ((labels < 0) & (labels != -100)) | (labels >= self.config.vocab_size)
        if wrong.any():
            got = f"label {int(labels[wrong][0])}"
            allowed = f"ids from 0 to {self.config.vocab_size - 1}, or -100 for tokens that do not count"
            raise ShapeError("labels", got, allowed, "Correct the labels.")


class PolymixGPTModel(PolymixModel):
    """GPT-2's architecture without a head."""

    config_class = PolymixGPTConfig


class PolymixGPTForCausalLM(PolymixForCausalLM):
    """GPT-2's architecture with any mixers; see `PolymixForCausalLM`."""

    config_class = PolymixGPTConfig
    base_class = PolymixGPTModel


class PolymixLlamaModel(PolymixModel):
    """Llama's architecture without a head."""

    config_class = PolymixLlamaConfig


class PolymixLlamaForCausalLM(PolymixForCausalLM):
    """Llama's architecture with any mixers; see `PolymixForCausalLM`."""

    config_class = PolymixLlamaConfig
    base_class = PolymixLlamaModel
