"""Attention of models that label pixels: SegFormer, EoMT and the decoder of Mask2Former."""

from __future__ import annotations

from dataclasses import replace
from importlib import metadata
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter
from polymix.convert.adapters.transformers.detection import DetrAdapter
from polymix.convert.adapters.transformers.encoders import EncoderAdapter, classes, read
from polymix.convert.adapters.transformers.images import VitAdapter
from polymix.convert.spec import AttentionSpec
from polymix.errors import CapabilityError, OptionError
from polymix.mixers import TokenMixer

_HIDDEN = -1e8  # EoMT adds -1e9 to the scores that it hides
_REDUCTION = "sequence_reduction"
_ALL_PLACES = "makes keys and values of fewer places; a mixer that reads no context mixes all places instead"


@register_adapter(*classes({"segformer": "Segformer"}))
class SegformerAdapter(EncoderAdapter):
    """(tokens, height, width) -> (output, None). Keys and values may come from a map that a convolution made smaller.

    A mixer that reads a context keeps the convolution: its queries are all places, its context is the smaller map. A
    mixer without one mixes all places, and the convolution is dropped.
    """

    @classmethod
    def copies(cls, mixer: TokenMixer) -> tuple[str, ...]:
        return (_REDUCTION,) if mixer.capabilities.cross else ()

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        if not hasattr(module, "sequence_reduction_ratio"):
            got = f"SegFormer of transformers {metadata.version('transformers')}"
            cure = "Install a newer one with: pip install -U transformers"
            raise OptionError("model", got, "SegFormer as transformers 5.23 has it", cure)
        reduction = getattr(module, _REDUCTION, None)
        lost = [] if reduction is None else [f"{_REDUCTION}.{key}" for key, _ in reduction.named_parameters()]
        attention = read(module)[1]
        return replace(attention, any_length=True, drops={**attention.drops, **dict.fromkeys(lost, _ALL_PLACES)})

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        stage = next((part for part in host.chain() if type(part).__name__ == "SegformerStage"), None)
        return None if stage is None else stage.get_submodule("patch_embeddings.proj")

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        arguments = self.named(args, kwargs)
        x, grid = arguments["hidden_states"], (arguments["height"], arguments["width"])
        if arguments.get("attention_mask") is not None:
            raise CapabilityError("attention_mask", "a mask", "None: SegFormer pads nothing", "Leave it out.")
        reduction = dict(self.named_children()).get(_REDUCTION)
        return self.mix(x, None if reduction is None else reduction(x, *grid), grid=grid), None


@register_adapter(*classes({"eomt": "Eomt"}))
class EomtAdapter(VitAdapter):
    """(hidden_states, attention_mask) -> (output, None). In the last blocks the queries stand in front of all tokens.

    There the host hides places from queries, in training and until its `attn_mask_probs` are 0: a mask that differs
    from query to query, which only mixers for arbitrary masks (softmax, pom) support.
    """

    checks_masks = False  # the mask argument adds -1e9 to scores, which `alone` reads

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        attention = super().describe(module, host)
        model: Any = next((part for part in host.chain() if hasattr(part, "attn_mask_probs")), None)
        number = next((int(part) for part in reversed(host.name.split(".")) if part.isdigit()), None)
        if model is None or number is None or number < model.num_hidden_layers - model.config.num_blocks:
            return attention
        return replace(attention, prefix=attention.prefix + model.config.num_queries)

    def alone(self, x: Tensor, arguments: dict[str, Any], cache: Any = None, values: Tensor | None = None) -> Tensor:
        mask = arguments.get("attention_mask")
        if isinstance(mask, Tensor) and mask.is_floating_point():
            arguments = {**arguments, "attention_mask": mask > _HIDDEN}
        return super().alone(x, arguments, cache, values)


@register_adapter(*classes({"mask2former": "Mask2Former"}))
class Mask2FormerAdapter(DetrAdapter):
    """Self-attention of the decoder, (N, B, D) -> ((N, B, D), None), between the queries of the masks."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        config = next(filter(None, (getattr(part, "config", None) for part in host.chain())), None)
        return replace(
            read(module)[1], own_values=True, any_length=False, max_tokens=getattr(config, "num_queries", None)
        )

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        # The decoder always asks for the weights, and passes them on if the model was asked for them.
        arguments = self.named(args, {**kwargs, "output_attentions": False})
        for name in ("attention_mask", "key_value_states"):
            if arguments.get(name) is not None:
                cure = "Keep this layer: name the others in the plan."
                raise CapabilityError(name, "a tensor", "None, as Mask2Former's decoder calls it", cure)
        x, positions = arguments["hidden_states"].transpose(0, 1), arguments.get("position_embeddings")
        query = x if positions is None else x + positions.transpose(0, 1)
        return self.mix(query, values=None if positions is None else x).transpose(0, 1), None
