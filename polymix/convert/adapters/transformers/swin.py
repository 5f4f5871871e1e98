"""Attention of transformers' Swin, in windows of the feature map; every second layer shifts them."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from polymix.convert.adapter import Host, register_adapter, register_refusal
from polymix.convert.adapters.transformers.encoders import NamedArguments, classes, read
from polymix.convert.heads import MERGED, biased_by
from polymix.convert.spec import AttentionSpec
from polymix.convert.windows import Windows, WindowsAdapter
from polymix.errors import OptionError
from polymix.mixers import TokenMixer
from polymix.mixers.inheritance import Projection

_TABLE = "relative_position_bias_table"


@register_adapter(*classes({"swin": "Swin"}))
class SwinAdapter(NamedArguments, WindowsAdapter):
    """(windows, mask) -> (output, None), or (output,) as older versions return it."""

    padded_first = True
    shift_varies = True

    def __init__(self, mixer: TokenMixer, attention: AttentionSpec, module: nn.Module) -> None:
        super().__init__(mixer, attention, module)
        self.read_signature(module)
        self.single = "output_attentions" in self.names

    @classmethod
    def describe(cls, module: nn.Module, host: Host) -> AttentionSpec:
        attention, layer = read(module)[1], host.above()
        name, table = next((key, p) for key, p in module.named_parameters() if key.endswith(_TABLE))
        side = round((len(table) ** 0.5 + 1) / 2)  # of a window: the table has (2 · side - 1)² rows
        size: Any = getattr(layer, "input_resolution", None)
        shift = getattr(layer, "shift_size", 0)
        place: dict[str, Any] = {"window": (side, side), "shift": (shift, shift), "feature_size": size}
        if host.windows == "keep":
            relative = Projection(table, None, (name,))
            return Windows(**{**vars(attention), **place, "merged": False, "grid": (side, side), "relative": relative})
        if size is None:
            cure = "Convert the whole model."
            raise OptionError("windows", "merge", "keep, where the attention is not in a SwinLayer", cure)
        drops = {**attention.drops, **biased_by([name], MERGED)}
        place |= {"span": side**2, "any_length": True, "merged": True}
        return Windows(**{**vars(attention), **place, "grid": tuple(size), "drops": drops})

    @classmethod
    def feature_map(cls, module: nn.Module, host: Host) -> nn.Module | None:
        """What made the tokens of this stage: the patches, or the stage before."""
        around = list(host.chain())
        for part in around:
            stages = getattr(getattr(part, "encoder", None), "layers", None)
            if stages is not None:
                place = next(i for i, stage in enumerate(stages) if stage in around)
                return part.get_submodule("embeddings.patch_embeddings") if not place else stages[place - 1].downsample
        return None

    @classmethod
    def grid_of(cls, module: nn.Module, args: Any, output: Any) -> tuple[int, ...]:
        if isinstance(output, tuple):  # (patches, size)
            return tuple(output[1])
        height, width = args[1]
        return -(-height // 2), -(-width // 2)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor] | tuple[Tensor, None]:
        arguments = self.named(args, kwargs)
        y = self.mix_windows(arguments["hidden_states"], arguments.get("attention_mask"))
        return (y,) if self.single else (y, None)


register_refusal(
    "its scores are cosines, with a learned temperature and biases from a network, which no mixer starts from",
    *classes({"swinv2": "Swinv2"}),
)
