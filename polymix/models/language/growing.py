"""Keys and values of attention with room for more tokens, so that a token does not copy all those before it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import DynamicLayer


class GrowingLayer(DynamicLayer):
    """A DynamicLayer of transformers that appends in place: its keys and values are views of larger buffers.

    A full buffer is replaced by one with a quarter more tokens. While gradients are recorded, and in a traced graph, it
    concatenates as transformers does.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.rooms: dict[str, Tensor] = {}

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **options: Any) -> tuple[Tensor, Tensor]:
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return super().update(key_states, value_states, *args, **options)
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        self.keys = self._append("keys", self.keys, key_states)
        self.values = self._append("values", self.values, value_states)
        return self.keys, self.values

    def _append(self, name: str, held: Tensor, new: Tensor) -> Tensor:
        """held (B, h, N, d) followed by new (B, h, M, d), in the buffer that begins with `held` if there is one."""
        before = held.shape[-2] if held.numel() else 0
        after, room = before + new.shape[-2], self.rooms.get(name)
        if room is None or after > room.shape[-2] or not self._begins(room, held, before):
            room = new.new_empty(*new.shape[:2], after + after // 4 + 64, new.shape[-1])
            if before:
                room[:, :, :before] = held
            self.rooms[name] = room
        room[:, :, before:after] = new
        return room[:, :, :after]

    @staticmethod
    def _begins(room: Tensor, held: Tensor, before: int) -> bool:
        """Whether `held` is the beginning of `room`, and may be written: beams and selected rows are other tensors."""
        writable = torch.is_inference_mode_enabled() or not room.is_inference()
        same = held.data_ptr() == room.data_ptr() and held.stride() == room.stride() and held.dtype == room.dtype
        return bool(before) and writable and same and held.shape[:2] == room.shape[:2]

    def reset(self) -> None:
        self.rooms = {}
        super().reset()


def grow(cache: Any, index: int) -> None:
    """Make layer `index` of a DynamicCache a GrowingLayer, if it is an empty layer of transformers' usual kind."""
    layers = cache.layers
    if len(layers) == index and getattr(cache, "layer_class_to_replicate", None) is DynamicLayer:
        layers.append(GrowingLayer())
    elif len(layers) > index and type(layers[index]) is DynamicLayer and not layers[index].get_seq_length():
        layers[index] = GrowingLayer()
