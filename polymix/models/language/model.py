"""The models: embeddings, blocks, a norm and a head, as PreTrainedModels of transformers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from transformers import DynamicCache, GenerationMixin
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast

from polymix.errors import OptionError, ShapeError
from polymix.models.language.block import FAMILIES, LanguageBlock
from polymix.models.language.config import PolymixConfig, PolymixGPTConfig, PolymixLlamaConfig
from polymix.models.language.fill import on_meta
from polymix.models.language.order import Order, settle, tokens_in
from polymix.models.language.pretrained import PolymixPreTrainedModel


class PolymixModel(PolymixPreTrainedModel):
    """input_ids (B, N) -> last_hidden_state (B, N, hidden_size).

    Cost in N: that of the mixers, linear but for softmax. See `PolymixForCausalLM` for the arguments.
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
            raise OptionError("output_attentions", True, "False: a mixer has no scores", "Leave it out.")
        if (input_ids is None) == (inputs_embeds is None):
            raise ShapeError("input_ids", "both or neither of input_ids and inputs_embeds", "one", "Pass one of them.")
        x = self.embed(input_ids) if inputs_embeds is None else inputs_embeds
        packed = segment_ids is not None
        wanted = (self.config.use_cache and not self.training and not packed) if use_cache is None else use_cache
        past, cached = tokens_in(past_key_values, len(self.blocks)), past_key_values is not None or bool(use_cache)
        order = settle(x, attention_mask, position_ids, segment_ids, past, cached)
        if wanted and past_key_values is None and order.segments is None:
            past_key_values = DynamicCache()
        if self.position is not None:
            self._check_learned(order, position_ids)
            x = x + self.position(order.place)
        x = self.drop(x)
        shown = self.config.output_hidden_states if output_hidden_states is None else output_hidden_states
        states: tuple[Tensor, ...] = ()
        for block in self.blocks:
            states = (*states, x) if shown else ()
            x = block(x, order, past_key_values=past_key_values)
        x = self.norm(x)
        out = BaseModelOutputWithPast(
            last_hidden_state=x, past_key_values=past_key_values, hidden_states=(*states, x) if shown else None
        )
        return out.to_tuple() if return_dict is False else out

    def _check_learned(self, order: Order, given: Tensor | None) -> None:
        """That there is a vector for every position; a device is asked only where counting leaves it open."""
        there, counted = self.config.max_position_embeddings, order.past + order.place.shape[1]
        if torch.compiler.is_compiling() or (given is None and counted <= there):
            return
        highest = int(order.place.max())
        if highest >= there:
            cure = 'Shorten the input, or use positions="rotary" or "none".'
            raise ShapeError("input_ids", f"position {highest}", f"less than max_position_embeddings={there}", cure)


class PolymixForCausalLM(PolymixPreTrainedModel, GenerationMixin):
    """A language model; `PolymixGPTForCausalLM` and `PolymixLlamaForCausalLM` are its two shapes.

        X = E[ids] + P[place];   X ← block(X), L times;   logits = norm(X) W

    forward takes what every causal model of transformers takes, and segment_ids (B, N): packed sequences, which do not
    see each other (position ids that start anew say the same). attention_mask (B, tokens so far) hides padding, on
    either side, which is as if it were not there. past_key_values holds a state a layer, whose size does not depend on
    N (softmax layers: their keys and values); it is handed back outside training. It can be reordered for beams, not
    cropped. labels (B, N) are shifted here; -100 is ignored. logits_to_keep: only the last so many tokens' logits.

    Raises:
        ShapeError, MaskError, StateError: for ids, masks and caches that do not fit, before a layer runs.
    Cost in N: that of the mixers, linear but for softmax; a token after a cache costs the same at any length.
    Source: PM-007, PM-029 … PM-033, PM-068.
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
        out = self.model(
            input_ids, attention_mask, position_ids, past_key_values, inputs_embeds, use_cache, segment_ids,
            output_hidden_states, output_attentions=other.pop("output_attentions", None),
        )  # fmt: skip
        kept = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        logits = self.lm_head(out.last_hidden_state[:, kept])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **other)
        result = CausalLMOutputWithPast(
            loss=loss, logits=logits, past_key_values=out.past_key_values, hidden_states=out.hidden_states
        )
        return result.to_tuple() if return_dict is False else result


class PolymixGPTModel(PolymixModel):
    """GPT-2's shape without a head."""

    config_class = PolymixGPTConfig


class PolymixGPTForCausalLM(PolymixForCausalLM):
    """GPT-2's shape; see `PolymixForCausalLM`."""

    config_class = PolymixGPTConfig
    base_class = PolymixGPTModel


class PolymixLlamaModel(PolymixModel):
    """Llama's shape without a head."""

    config_class = PolymixLlamaConfig


class PolymixLlamaForCausalLM(PolymixForCausalLM):
    """Llama's shape; see `PolymixForCausalLM`."""

    config_class = PolymixLlamaConfig
    base_class = PolymixLlamaModel
