"""Attention of DETR and its relatives, which add positions to queries and keys, not to values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter, register_refusal
from polymix.convert.adapters.transformers.encoders import EncoderAdapter, classes, read
from polymix.convert.spec import AttentionSpec

_DETR = "transformers.models.detr.modeling_detr.Detr"
_CONDITIONAL = "transformers.models.conditional_detr.modeling_conditional_detr"
_DETR_LIKE = {"maskformer": "MaskFormerDetr", "deformable_detr": "DeformableDetr"}  # decoders like DETR's
_RT_DETR = {"rt_detr": "RTDetr", "rt_detr_v2": "RTDetrV2", "d_fine": "DFine"}
_DEFORMABLE = {**_RT_DETR, "deformable_detr": "DeformableDetr", "grounding_dino": "GroundingDino"}
_PROJECTED = "projects positions; the mixer reads them added to the tokens"


@register_adapter(
    *(f"{_DETR}{kind}Attention" for kind in ("Self", "Cross", "")), f"{_CONDITIONAL}.ConditionalDetrSelfAttention",
    f"{_CONDITIONAL}.DetrAttention", *classes({"table_transformer": "TableTransformer"}),
    *(path for kind in ("Self", "Cross") for path in classes({f: f"{name}{kind}" for f, name in _DETR_LIKE.items()})),
)  # fmt: skip
class DetrAdapter(EncoderAdapter):
    """(x, positions, context, its positions) -> (output, None). Queries and keys get the positions, values do not.

    Mixers with one input read x with the positions, unless `convert` is told otherwise.
    """

    positions = "all"

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        inner, attention = read(module)
        cross = host.name.endswith("encoder_attn")
        queries = type(host.above()).__name__.endswith("DecoderLayer") and not cross
        config = next(filter(None, (getattr(part, "config", None) for part in (inner, *host.chain()))), None)
        return replace(
            attention, cross=cross, any_length=not queries, own_values=True,
            max_tokens=getattr(config, "num_queries", None) if queries else None,
        )  # fmt: skip

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        if not type(host.above()).__name__.endswith("EncoderLayer"):
            return None
        parts = (pair for part in host.chain() for pair in part.named_modules())
        return next((part for name, part in parts if name.rpartition(".")[2] == "position_embedding"), None)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, None]:
        arguments = self.named(args, kwargs)
        x, context = arguments["hidden_states"], arguments.get("key_value_states")
        query = _sum(x, _first(arguments, "position_embeddings", "query_position_embeddings", "object_queries"))
        if context is None:
            return self.alone(query, arguments, values=x), None
        key = _sum(context, _first(arguments, "encoder_position_embeddings", "spatial_position_embeddings"))
        return self.across(query, key, arguments.get("attention_mask"), context), None


def _sum(x: Tensor, positions: Tensor | None) -> Tensor:
    return x if positions is None else x + positions


def _first(arguments: dict[str, Any], *names: str) -> Tensor | None:
    """The first of the arguments that was passed; releases name it differently."""
    return next((arguments[name] for name in names if arguments.get(name) is not None), None)


@register_adapter(f"{_CONDITIONAL}.ConditionalDetrDecoderSelfAttention")
class ConditionalDetrAdapter(DetrAdapter):
    """Self-attention of the decoder, which projects positions before it adds them; the mixer reads their plain sum."""

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        attention = super().describe(module, host)
        lost = {f"{name}.{key}": _PROJECTED for name in ("q_pos_proj", "k_pos_proj") for key in ("weight", "bias")}
        return replace(attention, drops={**attention.drops, **lost})


@register_adapter(*classes({file: f"{name}Self" for file, name in _RT_DETR.items()}))
class RtDetrAdapter(DetrAdapter):
    """Self-attention of RT-DETR and D-FINE: between the places of the smallest feature map, or between queries."""

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        """The projection of the map that the encoder's layer reads: its number is that of `encode_proj_layers`."""
        parts = host.name.split(".")
        model = next((part for part in host.chain() if hasattr(part, "encoder_input_proj")), None)
        if "aifi" not in parts or model is None:
            return None
        levels: Any = model.config
        return model.get_submodule(
            f"encoder_input_proj.{levels.encode_proj_layers[int(parts[parts.index('aifi') + 1])]}"
        )


register_refusal(
    "deformable attention reads its keys at places that each query chooses, which no mixer does",
    "transformers.models.mask2former.modeling_mask2former.Mask2FormerPixelDecoderEncoderMultiscaleDeformableAttention",
    *classes({file: f"{name}MultiscaleDeformable" for file, name in _DEFORMABLE.items()}),
)
register_refusal(
    "its queries and keys are content and positions side by side, twice as wide as the values",
    f"{_CONDITIONAL}.ConditionalDetrDecoderCrossAttention",
)
