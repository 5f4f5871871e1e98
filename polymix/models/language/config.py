"""The configs of the language models, the papers' models by name, and configs with matched parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import transformers
from transformers import PretrainedConfig

from polymix.errors import (
    OptionError,
    UnknownNameError,
    check_choice,
    check_divides,
    check_int,
    check_number,
    nearest_first,
)
from polymix.limits import LAYERS
from polymix.mixers import MixerConfig
from polymix.mixers.spec import mixer_config, parse_mixer

POSITIONS = ("learned", "rotary", "none")
Entry = str | dict[str, Any]  # "pom:degree=3", or its config as a dict


class PolymixConfig(PretrainedConfig):
    """The options of both families. Use `PolymixGPTConfig` or `PolymixLlamaConfig`.

    Args:
        vocab_size, hidden_size, num_layers, num_heads: sizes. The heads are for mixers that leave their number open:
            attention and qt.
        mixers: the mixer of each layer, or a pattern that is repeated over the layers, as names like those of the
            command line ("pom:degree=3", "local:window=64"), configs or their dicts. Any causal and recurrent mixer
            works, and "softmax", whose cache grows.
        intermediate_size: hidden units of the feed-forward; None: the family's default.
        max_position_embeddings: number of learned positions; without these only the length trained for.
        positions: "learned" adds a vector per position; "rotary" sets the rotary option of mixers that have one and
            have not set it; "none" leaves order to the mixers (causal sums, convolutions, recurrences).
        rope_theta: base of the rotary angles of attention.
        bias: of mixers and feed-forward. norm_eps: of the norms.
        dropout: of embeddings, mixers and feed-forward.
        short_conv: taps of a causal depthwise convolution before every mixer but attention; 0: none.
        tie_word_embeddings: one matrix for input and output.
        initializer_range: standard deviation of the initial embeddings and feed-forward weights.
        use_cache: return a cache outside training.
    Raises:
        OptionError, UnknownNameError: naming the option or the entry of `mixers`.
    """

    attribute_map = {"num_hidden_layers": "num_layers", "num_attention_heads": "num_heads"}  # noqa: RUF012
    keys_to_ignore_at_inference = ["past_key_values"]  # noqa: RUF012

    def __init__(
        self, vocab_size: int = 50304, hidden_size: int = 768, num_layers: int = 12, num_heads: int = 12,
        mixers: Sequence[Entry | MixerConfig] | Entry | MixerConfig = ("pom",), intermediate_size: int | None = None,
        max_position_embeddings: int = 1024, positions: str = "learned", rope_theta: float = 1e4, bias: bool = True,
        norm_eps: float = 1e-5, dropout: float = 0.0, short_conv: int = 0, tie_word_embeddings: bool = True,
        initializer_range: float = 0.02, use_cache: bool = True, **other: Any,
    ) -> None:  # fmt: skip
        sizes = {
            "vocab_size": vocab_size, "hidden_size": hidden_size, "num_layers": num_layers, "num_heads": num_heads,
            "max_position_embeddings": max_position_embeddings,
        }  # fmt: skip
        for name, value in sizes.items():
            check_int(name, value, 1)
            setattr(self, name, value)
        check_int("num_layers", num_layers, 1, LAYERS)
        check_divides("num_heads", num_heads, "hidden_size", hidden_size)
        if intermediate_size is not None:
            check_int("intermediate_size", intermediate_size, 1)
        check_choice("positions", positions, POSITIONS)
        flags = {"bias": bias, "tie_word_embeddings": tie_word_embeddings, "use_cache": use_cache}
        for name, value in flags.items():
            check_choice(name, value, (True, False))
        check_int("short_conv", short_conv, 0)
        check_number("dropout", dropout, 0.0, 1.0, "a probability in [0, 1)", 0.0)
        check_number("rope_theta", rope_theta, 1.0, math.inf, "a base of at least 1", 1e4)
        check_number("norm_eps", norm_eps, 0.0, 1.0, "a small number", 1e-5)
        check_number("initializer_range", initializer_range, 0.0, math.inf, "a number of at least 0", 0.02)
        self.intermediate_size = self.usual_size(hidden_size) if intermediate_size is None else intermediate_size
        self.positions, self.rope_theta, self.bias = positions, rope_theta, bias
        self.norm_eps, self.dropout, self.short_conv = norm_eps, dropout, short_conv
        self.initializer_range, self.use_cache = initializer_range, use_cache
        entries = [mixers] if isinstance(mixers, (str, Mapping, MixerConfig)) else list(mixers)
        if not entries:
            raise OptionError("mixers", "none", "one per layer, or a pattern", 'Pass mixers=["pom"], say.')
        if len(entries) > num_layers:
            got = f"{len(entries)} for {num_layers} layers"
            raise OptionError("mixers", got, "one per layer, or a shorter pattern", "Drop some.")
        self.mixers: list[Entry] = [e.to_dict() if isinstance(e, MixerConfig) else e for e in entries]
        self.layer_configs()
        super().__init__(**{"tie_word_embeddings": tie_word_embeddings, **other})

    @staticmethod
    def usual_size(hidden_size: int) -> int:
        """Default hidden units of the feed-forward."""
        return 4 * hidden_size

    def layer_configs(self) -> list[MixerConfig]:
        """The mixer of every layer, with the model's order, heads, positions, biases and dropout."""
        pattern = [self._config(entry, f"mixers[{place}]") for place, entry in enumerate(self.mixers)]
        return [pattern[place % len(pattern)] for place in range(self.num_layers)]

    def _config(self, entry: Entry, where: str) -> MixerConfig:
        if isinstance(entry, str):
            options = {word.partition("=")[0] for word in entry.split(":")[1:]}
            config = parse_mixer(entry)[1]
        elif isinstance(entry, Mapping) and "name" in entry:
            options, config = set(entry), mixer_config(dict(entry))
        else:
            raise OptionError(where, repr(entry), 'a name, "pom:degree=3", or a dict with "name"', "Write it so.")
        options |= set(config.forms.get(config.preset or "", {}))
        defaults = {"bias": self.bias, "dropout": self.dropout}
        config = config.changed(**{name: value for name, value in defaults.items() if name not in options})
        turns = self.positions == "rotary" and "rotary" not in options
        return config.for_heads(self.num_heads).for_order().for_rotary(self.rope_theta if turns else None)


class PolymixGPTConfig(PolymixConfig):
    """GPT-2: LayerNorm, a GELU feed-forward of 4 × hidden_size, learned positions. Options: `PolymixConfig`."""

    model_type = "polymix-gpt"

    def __init__(self, **options: Any) -> None:  # transformers 5 makes one for a class without
        super().__init__(**options)


class PolymixLlamaConfig(PolymixConfig):
    """Llama: RMSNorm, SwiGLU of 8/3 × hidden_size (a multiple of 64), rotary positions, no biases.

    Options: `PolymixConfig`.
    """

    model_type = "polymix-llama"

    def __init__(
        self, vocab_size: int = 32000, positions: str = "rotary", bias: bool = False, tie_word_embeddings: bool = False,
        max_position_embeddings: int = 2048, **other: Any,
    ) -> None:  # fmt: skip
        super().__init__(
            vocab_size=vocab_size, positions=positions, bias=bias, tie_word_embeddings=tie_word_embeddings,
            max_position_embeddings=max_position_embeddings, **other,
        )  # fmt: skip

    @staticmethod
    def usual_size(hidden_size: int) -> int:
        return 64 * math.ceil(8 * hidden_size / 3 / 64)


_LLAMA = {"hidden_size": 1024, "num_layers": 20, "num_heads": 16}
# Name: the family, its options, and the number of parameters in the paper.
PRESETS: Mapping[str, tuple[type[PolymixConfig], dict[str, Any], str]] = {
    "gpt2-s": (PolymixGPTConfig, {"mixers": ["softmax"]}, "125 M"),
    "gppom2-s": (PolymixGPTConfig, {"mixers": ["pom"]}, "as GPT2-S"),
    "gppom2-s-hybrid": (PolymixGPTConfig, {"mixers": ["pom", "local"]}, "as GPT2-S"),
    # PoM's Supplement B names its size alone: here it is GPT2-S with Mamba in attention's place.
    "mamba-s": (PolymixGPTConfig, {"mixers": ["mamba"]}, "124 M"),
    "llama-300m": (PolymixLlamaConfig, {**_LLAMA, "mixers": ["softmax"]}, "about 300 M"),
    # 11 taps, degree 2, 20 layers: the last token sees 201 tokens, of 2,048 in training. The convolutions' order is all
    # that it knows of positions. With dilations of 1 to 64 it sees 3,171.
    "llama-300m-padre": (PolymixLlamaConfig, {**_LLAMA, "mixers": ["padre"]}, "about 300 M"),
    "llama-300m-padre-dilated": (
        PolymixLlamaConfig,
        {**_LLAMA, "mixers": [f"padre:token=depthwise:dilation={2**i}" for i in range(7)]},
        "not in the paper",
    ),
}


def preset(name: str, **changes: Any) -> PolymixConfig:
    """A config of the papers by name, with changes.

    The feed-forward is sized so that the model has as many parameters as the same one with attention.
    "llama-300m-padre" sees the last 201 tokens only, and has no positions but the order in its convolutions;
    "llama-300m-padre-dilated" sees 3,171. Raises UnknownNameError, which lists the names.
    """
    if name not in PRESETS:
        raise UnknownNameError("preset", repr(name), ", ".join(nearest_first(name, PRESETS)), "Pick one of these.")
    family, options, _ = PRESETS[name]
    config = family(**{**options, **changes})
    return config if "intermediate_size" in changes else matched(config)


def parameters(config: PolymixConfig) -> int:
    """The number of parameters of a model of this config. Tied ones count once; nothing is allocated."""
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)
    model.tie_weights()
    return sum(p.numel() for p in {id(p): p for p in model.parameters()}.values())


def matched(config: PolymixConfig, like: PolymixConfig | None = None, multiple: int = 16) -> PolymixConfig:
    """The config whose number of parameters is nearest to that of `like`, by its intermediate_size.

    like: default: the same model with attention in every layer. The size is a multiple of `multiple`.
    """
    kind, options = type(config), config.to_diff_dict()
    like = kind(**{**options, "mixers": ["softmax"]}) if like is None else like
    one, two = (parameters(kind(**{**options, "intermediate_size": size})) for size in (multiple, 2 * multiple))
    steps = max(1, round((parameters(like) - one) / (two - one)) + 1)
    return kind(**{**options, "intermediate_size": steps * multiple})
