"""What a graph of ONNX holds: shapes, attributes, constants, and who reads a tensor."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

FLOAT, INT64 = 1, 7  # types of ONNX


def shapes_of(model: Any) -> dict[str, list[Any]]:
    """The shapes of all tensors: numbers, or names of free axes."""
    import onnx

    graph = onnx.shape_inference.infer_shapes(model, data_prop=True).graph
    shapes: dict[str, list[Any]] = {part.name: list(part.dims) for part in graph.initializer}
    for part in [*graph.value_info, *graph.input, *graph.output]:
        kind = part.type.tensor_type
        if kind.HasField("shape"):
            shapes[part.name] = [
                dim.dim_value if dim.HasField("dim_value") else dim.dim_param for dim in kind.shape.dim
            ]
    for node in graph.node:
        if node.op_type == "Constant":
            shapes.setdefault(node.output[0], [])
    return shapes


def constant_numbers(graph: Any) -> Iterator[tuple[str, list[int]]]:
    """Lists of whole numbers that are constants of a graph, such as axes, by name."""
    from onnx import numpy_helper

    tensors = [(part.name, part) for part in graph.initializer]
    for node in graph.node:
        if node.op_type == "Constant":
            if (whole := attribute(node, "value_ints", None)) is not None:
                yield node.output[0], list(whole)
            elif (tensor := attribute(node, "value", None)) is not None:
                tensors.append((node.output[0], tensor))
    for name, tensor in tensors:
        if tensor.data_type == INT64:
            yield name, numpy_helper.to_array(tensor).reshape(-1).tolist()


def read_by(node: Any) -> Iterator[str]:
    """The tensors that a node reads, itself or in the graphs inside it, of branches and loops."""
    yield from node.input
    for part in node.attribute:
        for graph in (part.g, *part.graphs):
            for inner in graph.node:
                yield from read_by(inner)
            yield from (output.name for output in graph.output)


def uses_of(graph: Any) -> Counter[str]:
    """How often each tensor is read, or returned."""
    read = (name for node in graph.node for name in read_by(node))
    return Counter([*read, *(output.name for output in graph.output)])


def attribute(node: Any, name: str, default: Any) -> Any:
    """An attribute of a node."""
    from onnx import helper

    return next((helper.get_attribute_value(part) for part in node.attribute if part.name == name), default)


def count_of(sizes: Sequence[Any]) -> int | None:
    """The product of sizes; None if one is free."""
    return int(np.prod(sizes)) if all(isinstance(size, int) for size in sizes) else None
