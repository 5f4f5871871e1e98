"""Some tensors of an 8-bit graph in 16 bits: as few as it takes to keep an error."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from polymix.export.onnx_graphs import shapes_of

PRODUCTS = ("MatMul", "Conv", "Gemm", "ConvTranspose")
SHAPING = ("Reshape", "Transpose", "Slice", "Squeeze", "Unsqueeze", "Expand", "Split", "Identity", "Flatten")
UNROUNDED = ("Constant", "Shape", "Cast", "CastLike", *SHAPING)  # no numbers of their own to round
Group = tuple[str, ...]  # names of tensors that are widened together


def product_groups(model: Any, scheme: str) -> Iterator[Group]:
    """Weights of each product, and its inputs where these are in 8 bits; its bias stays."""
    constants = {part.name for part in model.graph.initializer}
    for node in model.graph.node:
        if node.op_type in PRODUCTS:
            names = [name for name in node.input[:2] if scheme == "a8w8" or name in constants]
            if names:
                yield tuple(dict.fromkeys(names))


def operator_groups(model: Any, scheme: str) -> Iterator[Group]:
    """The outputs of each operator, with what only gives them another shape, and the graph's inputs.

    Where these are in 16 bits already: the weights of matrices. (Filters in 16 bits are less exact in Qualcomm's
    emulator than those in 8.)
    """
    if scheme != "a8w8":
        ranks = {part.name: len(part.dims) for part in model.graph.initializer}
        for node in model.graph.node:
            if node.op_type in ("MatMul", "Gemm") and ranks.get(node.input[1]) == 2:
                yield (node.input[1],)
        return
    constants = {part.name for part in model.graph.initializer}
    shapes = shapes_of(model)
    readers: dict[str, list[Any]] = {}
    for node in model.graph.node:
        for name in node.input:
            readers.setdefault(name, []).append(node)

    def followed(names: Sequence[str]) -> Iterator[str]:
        for name in names:
            yield name
            for node in readers.get(name, ()):
                if node.op_type in SHAPING and node.input[0] == name:
                    yield from followed(node.output)

    starts = [[part.name for part in model.graph.input if part.name not in constants]]
    starts += [list(node.output) for node in model.graph.node if node.op_type not in UNROUNDED]
    for start in starts:
        yield tuple(dict.fromkeys(name for name in followed(start) if name in shapes))


def fewest(groups: Sequence[Group], error_of: Callable[[frozenset[str]], float], limit: float) -> frozenset[str]:
    """The tensors to widen: those that help most alone, and as few as keep the limit; all, if no number keeps it.

    Each group costs one call of `error_of`, and the number of groups a few more.
    """
    if not groups:
        return frozenset()
    alone = [(error_of(frozenset(group)), place) for place, group in enumerate(groups)]
    order = [groups[place] for _, place in sorted(alone)]
    fewest, most = 1, len(order)
    while fewest < most:
        middle = (fewest + most) // 2
        if error_of(_joined(order[:middle])) <= limit:
            most = middle
        else:
            fewest = middle + 1
    return _joined(order[:fewest])


def _joined(groups: Sequence[Group]) -> frozenset[str]:
    return frozenset(name for group in groups for name in group)
