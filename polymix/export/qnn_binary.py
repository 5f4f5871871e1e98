"""What Qualcomm's compiler wrote into a binary about memory, read with the library that comes with its package.

The structures are those of QnnSystemInterface.h, QnnSystemContext.h and HTP/QnnHtpSystemContext.h of Qualcomm's SDK.
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_char_p, c_uint32, c_uint64, c_void_p
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

THIRD, FIRST = 3, 1  # the versions of the structures that the SDK writes since its version 2.21
Fields = list[tuple[str, Any]]


@dataclass(frozen=True)
class OnChip:
    """Memory of a compiled graph, in bytes.

    reserved: of the processor's own memory (VTCM). spilled: of the phone's memory, for what does not fit.
    """

    reserved: int
    spilled: int


class _Version(Structure):
    _fields_: ClassVar[Fields] = [("major", c_uint32), ("minor", c_uint32), ("patch", c_uint32)]


class _Interface(Structure):
    _fields_: ClassVar[Fields] = [
        ("backend", c_uint32), ("name", c_char_p), ("version", _Version), ("create", c_void_p), ("info", c_void_p),
        ("metadata", c_void_p), ("free", c_void_p),
    ]  # fmt: skip


class _Binary(Structure):
    _fields_: ClassVar[Fields] = [
        ("version", c_uint32), ("unused", c_uint32), ("backend", c_uint32), ("build", c_char_p), ("core", _Version),
        ("backend_version", _Version), ("soc", c_char_p), ("context_version", _Version), ("context_size", c_uint64),
        ("tensor_count", c_uint32), ("tensors", c_void_p), ("graph_count", c_uint32), ("graphs", c_void_p),
    ]  # fmt: skip


class _Graph(Structure):
    _fields_: ClassVar[Fields] = [
        ("version", c_uint32), ("name", c_char_p), ("input_count", c_uint32), ("inputs", c_void_p),
        ("output_count", c_uint32), ("outputs", c_void_p), ("other_count", c_uint32), ("others", c_void_p),
        ("size", c_uint32), ("details", c_void_p),
    ]  # fmt: skip


class _Details(Structure):
    _fields_: ClassVar[Fields] = [
        ("version", c_uint32),
        ("spilled", c_uint64),
        ("reserved", c_uint32),
        ("level", c_uint32),
    ]


def on_chip(binary: Path, library: Path) -> OnChip | None:
    """The memory that a binary of one graph needs; None: the binary does not say.

    Args:
        binary: what `compile_context` left. library: libQnnSystem.so of the package onnxruntime-qnn.
    """
    system = ctypes.CDLL(str(library))
    providers, count = POINTER(POINTER(_Interface))(), c_uint32()
    if system.QnnSystemInterface_getProviders(ctypes.byref(providers), ctypes.byref(count)) or not count.value:
        return None
    calls = providers[0].contents
    create = ctypes.CFUNCTYPE(c_uint64, POINTER(c_void_p))(calls.create)
    read = ctypes.CFUNCTYPE(c_uint64, c_void_p, c_void_p, c_uint64, POINTER(POINTER(_Binary)))(calls.metadata)
    free = ctypes.CFUNCTYPE(c_uint64, c_void_p)(calls.free)
    handle, content, read_into = c_void_p(), binary.read_bytes(), POINTER(_Binary)()
    if create(ctypes.byref(handle)):
        return None
    try:
        if read(handle, content, len(content), ctypes.byref(read_into)):
            return None
        info = read_into.contents
        if info.version != THIRD or info.graph_count != 1:
            return None
        graph = ctypes.cast(info.graphs, POINTER(_Graph)).contents
        if graph.version != THIRD or graph.size < ctypes.sizeof(_Details):
            return None
        details = ctypes.cast(graph.details, POINTER(_Details)).contents
        return OnChip(details.reserved, details.spilled) if details.version == FIRST else None
    finally:
        free(handle)
