"""Runs the C kernels for aarch64 under qemu: every call is a process that gets the memory of the tensors and returns it."""

import ctypes
import gc
import os
import shutil
import struct
import subprocess
import tempfile
from pathlib import Path

import torch

from polymix.ops.native import compile

COMPILER, EMULATOR = "aarch64-linux-gnu-gcc", "qemu-aarch64"
ARGUMENTS = 16  # as in aarch64.c


def missing():
    """What cross-compiling and emulating need and this machine lacks (Debian: gcc-aarch64-linux-gnu, qemu-user), or None."""
    return " and ".join(name for name in (COMPILER, EMULATOR) if shutil.which(name) is None) or None


def build(folder):
    """Compile the kernels and the program that calls them; return its path. Workers that share `folder` build it once."""
    path = folder / f"kernels-{compile.fingerprint()}"
    if not path.is_file():
        folder.mkdir(parents=True, exist_ok=True)
        own = path.with_suffix(f".{os.getpid()}")
        flags = (*compile.FLAGS, *compile.LEVELS["aarch64"]["armv8-a"], "-Wno-builtin-declaration-mismatch")
        sources = [*compile.OPS.glob("*/*.c"), Path(__file__).with_name("aarch64.c")]
        command = [COMPILER, *flags, "-static", f"-I{compile.HEADERS}", *sources, "-o", own]
        subprocess.run(command, check=True, capture_output=True)
        own.replace(path)
    return path


def _tensors():
    """The memory of all live tensors, as (address, bytes); those made before `gc.freeze()` are left out, to be fast."""
    sizes = {}
    for value in gc.get_objects():
        if type(value) in (torch.Tensor, torch.nn.Parameter) and value.device.type == "cpu":
            memory = value.untyped_storage()
            if memory.nbytes():
                sizes[memory.data_ptr()] = memory.nbytes()
    return sorted(sizes.items())


class Emulated:
    """Stands in for the library that polymix.ops.native.library loads."""

    def __init__(self, program):
        self.program = program

    def __getattr__(self, name):
        return lambda *values: _Call(_tensors()).run(self.program, name, values)


class _Call:
    """The memory blocks of one call, and the addresses in them."""

    def __init__(self, tensors):
        self.tensors, self.blocks, self.moves = tensors, [], []  # blocks: (address in this process, content)
        self.known = {}

    def block_of(self, address):
        """The block that holds an address of this process, and the offset in it."""
        start, size = next((start, size) for start, size in self.tensors if start <= address < start + size)
        if start not in self.known:
            self.known[start] = len(self.blocks)
            self.blocks.append((start, ctypes.string_at(start, size)))
        return self.known[start], address - start

    def argument(self, place, value):
        """The number that stands for an argument; addresses are entered in `moves`."""
        if value is None or isinstance(value, int):
            return value or 0
        if isinstance(value, ctypes.c_void_p):
            if value.value:
                self.moves.append((-1, place, *self.block_of(value.value)))
            return 0
        record = value._obj  # of byref
        block = len(self.blocks)
        self.blocks.append((ctypes.addressof(record), bytes(record)))
        self.moves.append((-1, place, block, 0))
        for name, kind in record._fields_:
            if kind is ctypes.c_void_p and getattr(record, name):
                self.moves.append((block, getattr(type(record), name).offset, *self.block_of(getattr(record, name))))
        return 0

    def run(self, program, name, values):
        arguments = [self.argument(place, value) for place, value in enumerate(values)]
        arguments += [0] * (ARGUMENTS - len(arguments))
        numbers = [len(self.blocks), *(len(content) for _, content in self.blocks), *arguments, len(self.moves)]
        numbers += [number for move in self.moves for number in move]
        head = name.encode().ljust(64, b"\0") + struct.pack(f"<{len(numbers)}q", *numbers)
        with tempfile.NamedTemporaryFile() as file:
            file.write(head + b"".join(content for _, content in self.blocks))
            file.flush()
            failed = subprocess.run([EMULATOR, program, file.name]).returncode
            assert failed in (0, 1), f"{name} ended with {failed} under {EMULATOR}"
            file.seek(len(head))
            for address, content in self.blocks:
                ctypes.memmove(address, file.read(len(content)), len(content))
        return failed
