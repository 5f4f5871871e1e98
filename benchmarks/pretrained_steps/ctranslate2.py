"""Whisper from a file of CTranslate2: a reader of its binary format, and the weights by their names in transformers.

The format, all numbers little-endian: version; from version 2 the name of the spec and its revision; the number of
variables, and for each its name, rank, sizes, type and bytes; then aliases, each the name of another variable. Strings
are preceded by their length and end with a zero byte.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import DataError

VERSIONS = range(4, 7)  # earlier ones write the size of an element where these write its type
TYPES = (torch.float32, torch.int8, torch.int16, torch.int32, torch.float16, torch.bfloat16)
SCALE = "_scale"  # after a quantised weight's name: what it was multiplied by, for each row or in all
FORMAT = "a binary model file of CTranslate2, version 4 to 6"
PARTS = {  # of a layer
    "self_attention/layer_norm": "self_attn_layer_norm", "attention/layer_norm": "encoder_attn_layer_norm",
    "ffn/layer_norm": "final_layer_norm", "ffn/linear_0": "fc1", "ffn/linear_1": "fc2",
    "self_attention/linear_0": "self_attn.q_proj self_attn.k_proj self_attn.v_proj",
    "self_attention/linear_1": "self_attn.out_proj", "attention/linear_0": "encoder_attn.q_proj",
    "attention/linear_1": "encoder_attn.k_proj encoder_attn.v_proj", "attention/linear_2": "encoder_attn.out_proj",
}  # fmt: skip
LEAVES = {"gamma": "weight", "beta": "bias", "encodings": "weight"}
OTHERS = {"embeddings": "embed_tokens", "position_encodings": "embed_positions"}


class _Bytes:
    def __init__(self, path: Path) -> None:
        self.path, self.content, self.at = path, path.read_bytes(), 0

    def take(self, count: int) -> bytes:
        part = self.content[self.at : self.at + count]
        if len(part) < count:
            raise DataError("file", f"{self.path}, which ends early", FORMAT, "Fetch it again.")
        self.at += count
        return part

    def numbers(self, kind: str) -> tuple[int, ...]:
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))

    def string(self) -> str:
        return self.take(*self.numbers("H"))[:-1].decode("utf8")


def variables(path: Path) -> tuple[str, dict[str, Tensor]]:
    """The name of a file's spec, and its variables; those that were quantised are float32 again, aliases are resolved.

    Raises DataError for a file of another kind or version, or one that is cut short.
    """
    source = _Bytes(path)
    (version,) = source.numbers("I")
    if version not in VERSIONS:
        raise DataError("file", f"{path}, whose first number is {version}", FORMAT, "Convert the model again.")
    spec = source.string()
    _, count = source.numbers("II")  # the spec's revision is of no concern
    tensors: dict[str, Tensor] = {}
    for _ in range(count):
        name = source.string()
        (rank,) = source.numbers("B")
        *sizes, kind, size = source.numbers(f"{rank}IBI")
        if kind >= len(TYPES):
            raise DataError("file", f"{path}, where {name} is of type {kind}", FORMAT, "Convert the model again.")
        tensors[name] = torch.frombuffer(bytearray(source.take(size)), dtype=TYPES[kind]).reshape(sizes)
    for _ in range(*source.numbers("I")):
        alias, name = source.string(), source.string()
        tensors[alias] = tensors[name]
    return spec, {name: _restored(name, tensors) for name in tensors if not name.endswith(SCALE)}


def _restored(name: str, found: dict[str, Tensor]) -> Tensor:
    value, scale = found[name], found.get(name + SCALE)
    return value if scale is None else value.float() / scale.float().reshape(-1, *[1] * (value.ndim - 1))


def state_of(found: dict[str, Tensor]) -> dict[str, Tensor]:
    """The weights by their names in transformers. Joint maps of queries, keys and values are taken apart."""
    return {name: value.float() for old, weight in found.items() for name, value in _parts(old, weight)}


def _parts(old: str, weight: Tensor) -> Iterator[tuple[str, Tensor]]:
    path, _, leaf = old.rpartition("/")
    if not weight.is_floating_point() or weight.ndim == 0:
        return  # a setting
    leaf = LEAVES.get(leaf, leaf)
    if path == "decoder/projection":
        yield "proj_out.weight", weight
    elif layer := re.fullmatch(r"(\w+)/layer_(\d+)/(.+)", path):
        names = PARTS[layer[3]].split()
        for name, part in zip(names, weight.chunk(len(names)), strict=True):
            if not (name.endswith("k_proj") and leaf == "bias"):  # Whisper's keys have none, and the file has zeros
                yield f"model.{layer[1]}.layers.{layer[2]}.{name}.{leaf}", part
    else:
        side, name = path.split("/")
        yield f"model.{side}.{OTHERS.get(name, name)}.{leaf}", weight


def whisper_of(path: Path, **settings: Any) -> nn.Module:
    """transformers' WhisperForConditionalGeneration with a file's weights, in float32 and evaluation mode.

    settings: of the config, such as tokens; sizes are the file's own.
    """
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    spec, found = variables(path)
    if spec != "WhisperSpec":
        raise DataError("file", f"{path}, a {spec}", "a WhisperSpec", "Take a file of Whisper's.")
    state = state_of(found)
    tokens, width = state["model.decoder.embed_tokens.weight"].shape
    sizes = {"vocab_size": tokens, "d_model": width, "num_mel_bins": state["model.encoder.conv1.weight"].shape[1]}
    for side in ("encoder", "decoder"):
        sizes[f"{side}_layers"] = len({name for name in state if re.fullmatch(rf"model\.{side}.*\.fc1\.bias", name)})
        sizes[f"{side}_attention_heads"] = int(found[f"{side}/num_heads"])
        sizes[f"{side}_ffn_dim"] = len(state[f"model.{side}.layers.0.fc1.bias"])
    sizes["max_source_positions"] = len(state["model.encoder.embed_positions.weight"])
    sizes["max_target_positions"] = len(state["model.decoder.embed_positions.weight"])
    model = WhisperForConditionalGeneration(WhisperConfig(**sizes, **settings))
    model.load_state_dict(state)
    return model.eval()
