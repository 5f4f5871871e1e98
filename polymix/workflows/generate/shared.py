"""A long prompt that several processes read together, before one of them writes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from polymix.devices import join_processes, processes
from polymix.errors import OptionError, PolymixError
from polymix.mixers.cache import state_layer
from polymix.models.language.layers import mixers_of
from polymix.ops.shared.masks import positions
from polymix.parallel import alone, parallelize, shard
from polymix.parallel.mix import refuse_pieces
from polymix.parallel.style import check_split

from transformers import DynamicCache  # isort: skip  # after polymix, which cures torchvision


def share(model: Any) -> DeviceMesh:
    """Let all processes of torchrun share the sequences of a language model.

    Raises OptionError, CapabilityError: its layers are no mixers of polymix, or cannot be split or hand on no state.
    """
    if not mixers_of(model):
        got = f"more than 1 for a {type(model).__name__}"
        raise OptionError("sequence_parallel", got, "a language model of polymix.models.language", "Pass 1.")
    for mixer in check_split(model):
        refuse_pieces(mixer)
    join_processes()
    mesh = init_device_mesh(model.device.type, (processes()[1],), mesh_dim_names=("cp",))
    parallelize(model, mesh)
    return mesh


def from_first(work: Callable[[], Any]) -> Any:
    """What `work` returns in the first process, on all; an error of polymix too."""
    box: list[Any] = [None]
    if processes()[0] == 0:
        try:
            box = [work()]
        except PolymixError as error:
            box = [error]
    distributed.broadcast_object_list(box, device=torch.device("cpu"))
    if isinstance(box[0], PolymixError):
        raise box[0]
    return box[0]


def read_together(
    model: Any, ids: Tensor, mask: Tensor, copies: int, mesh: DeviceMesh
) -> AbstractContextManager[dict[str, Any]]:
    """Read prompts ids (B, N) on all processes; within what is returned, one of them writes.

    mask: (B, N), 0 for padding. copies: texts for each prompt. It gives what `model.generate` takes besides.
    """
    cache = _read(model, ids, mask, mesh) if ids.shape[1] > mesh.size() else None  # fewer tokens one reads as well
    if cache is not None:
        cache.batch_repeat_interleave(copies)
    return _alone(model, {} if cache is None else {"past_key_values": cache})


@contextmanager
def _alone(model: Any, known: dict[str, Any]) -> Iterator[dict[str, Any]]:
    with alone(model):
        yield known


@torch.no_grad()
def _read(model: Any, ids: Tensor, mask: Tensor, mesh: DeviceMesh) -> DynamicCache:
    """The cache after all tokens but the last, the same on every process."""
    n = ids.shape[1] - 1
    ids, real = ids[:, :n], mask[:, :n] > 0
    padding = None if bool(real.all()) else real
    places = positions(n, padding, None, ids.device).expand(len(ids), n)
    own, own_mask, own_places = (shard(part, mesh) for part in (ids, real, places))
    parts, whole = DynamicCache(), DynamicCache()
    model(own, own_mask, own_places, past_key_values=parts, use_cache=True, logits_to_keep=1)
    for index in range(len(parts.layers)):
        state_layer(whole, index).advance(state_layer(parts, index).state, n, padding)
    return whole
