"""Softmax attention over a sequence that processes share, in the two usual ways: what mixers are compared with.

ring         keys and values go round, a block at a time; each process sees every block once
all-to-all   each process gets all tokens of some heads (DeepSpeed-Ulysses)

Both take and return this process's tokens (B, n, D), of which all have as many, and are exact with gradients.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from polymix.errors import OptionError
from polymix.mixers import SoftmaxMixer
from polymix.parallel.collectives import Processes


def projections(mixer: SoftmaxMixer, x: Tensor) -> list[Tensor]:
    """Queries, keys and values (B, heads, n, d)."""
    return [part.transpose(1, 2) for part in mixer.qkv(x, x)]


def ring(mixer: SoftmaxMixer, processes: Processes, x: Tensor) -> Tensor:
    """Attention block by block, joined by the logarithms of the sums of the weights."""
    q, k, v = projections(mixer, x)
    block, size = torch.stack((k, v)).movedim(3, 0), processes.size  # (n, 2, B, heads, d)
    n, after, before = len(block), (processes.rank + 1) % size, (processes.rank - 1) % size
    send = [n * (rank == after) for rank in range(size)]
    receive = [n * (rank == before) for rank in range(size)]
    outputs, logarithms = [], []
    for turn in range(size):
        k, v = block.movedim(0, 3).unbind()
        scores = q @ k.transpose(2, 3) * q.shape[-1] ** -0.5
        logarithms.append(scores.logsumexp(3))
        outputs.append(scores.softmax(3) @ v)
        if turn < size - 1:
            block = processes.exchange(block, send, receive)
    weights = torch.stack(logarithms).softmax(0)
    y = (torch.stack(outputs) * weights[..., None]).sum(0)
    return mixer.proj(y.transpose(1, 2).flatten(2))


def all_to_all(mixer: SoftmaxMixer, processes: Processes, x: Tensor) -> Tensor:
    """Attention by heads. Raises OptionError: the processes do not divide the heads."""
    parts, size = torch.stack(projections(mixer, x)), processes.size  # (3, B, heads, n, d)
    if parts.shape[2] % size:
        raise OptionError("heads", parts.shape[2], f"a multiple of {size} processes", "")
    rows, n = parts.movedim(3, 0), parts.shape[3]
    whole = processes.exchange(torch.cat(rows.chunk(size, 3)), [n] * size, [n] * size)
    q, k, v = whole.movedim(0, 3).unbind()  # (B, heads / P, N, d)
    y = scaled_dot_product_attention(q, k, v)
    back = processes.exchange(y.movedim(2, 0), [n] * size, [n] * size)
    joined: Tensor = mixer.proj(torch.cat(back.chunk(size), 2).permute(1, 0, 2, 3).flatten(2))
    return joined
