"""A graph as a program of ExecuTorch, with XNNPACK: the target for phones."""

from __future__ import annotations

from pathlib import Path

import torch

from polymix.export.graph import Graph, Plain, quiet, refusal
from polymix.export.manifest import quiet_library, write_output_names
from polymix.extras import needs
from polymix.files import write_whole


def write_program(graph: Graph, path: Path) -> int:
    """Write a graph as a .pte file, for the inputs' own sizes, its outputs' names beside it.

    Returns:
        How many parts of the program XNNPACK runs; ExecuTorch's own operators run the rest.

    Raises:
        CapabilityError: PyTorch or ExecuTorch cannot export it. MissingExtraError: executorch is missing.
    """
    with needs("mobile"), quiet_library(2):  # its dependencies speak while they are imported
        from executorch.backends.xnnpack.partition.xnnpack_partitioner import XnnpackPartitioner
        from executorch.exir import to_edge_transform_and_lower
    try:
        with quiet(), torch.no_grad():
            program = torch.export.export(Plain(graph).eval(), tuple(graph.inputs.values()))
            lowered = to_edge_transform_and_lower(program, partitioner=[XnnpackPartitioner()])
            delegated = sum("executorch_call_delegate" in str(node.target)
                            for node in lowered.exported_program().graph.nodes)  # fmt: skip
            content = lowered.to_executorch().buffer
    except Exception as error:  # whatever the exporter raises
        raise refusal(graph, error) from error
    write_whole(path, lambda part: part.write_bytes(content))
    write_output_names(path, graph.call(graph.inputs))
    return delegated
