"""Launches of Triton kernels, caught instead of run and compiled for GPUs that need not be here.

The wheel of Triton brings NVIDIA's assembler (ptxas) and cuobjdump, and AMD's compiler as a library, so neither a GPU
nor a toolkit is needed.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import torch
import triton
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

import polymix.ops

TYPES = {
    torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16", torch.int64: "i64", torch.int32: "i32",
    torch.bool: "i1", torch.uint8: "u8", torch.int8: "i8",
}  # fmt: skip
ALIGNED = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class Card:
    """What a multiprocessor of a card holds, and its published peaks.

    Args:
        arch: the compute capability, 80 for 8.0; AMD's name of an architecture, such as gfx942.
        warps: that a multiprocessor holds at most.
        shared: bytes of shared memory of a multiprocessor.
        bytes_per_second: of its memory.
        flops: dense FLOP/s by type, on the unit that our kernels use for it.
        source: where the peaks are published.
    """

    arch: int | str
    warps: int
    shared: int
    bytes_per_second: float
    flops: Mapping[str, float]
    source: str

    @property
    def amd(self) -> bool:
        return isinstance(self.arch, str)

    @property
    def target(self) -> GPUTarget:
        return GPUTarget("hip", self.arch, 64) if self.amd else GPUTarget("cuda", self.arch, 32)


def _peaks(float32: float, tf32: float, bfloat16: float) -> dict[str, float]:
    """FLOP/s from TFLOP/s."""
    return {"float32": float32 * 1e12, "tf32": tf32 * 1e12, "bfloat16": bfloat16 * 1e12}


# What a multiprocessor holds: the table of compute capabilities in the CUDA C++ Programming Guide; the CDNA 3
# instruction set (a compute unit has 4 SIMDs of 8 waves, and 64 KB of shared memory).
CARDS = {
    "A100": Card(80, 64, 164 << 10, 2.039e12, _peaks(19.5, 156, 312), "NVIDIA A100 data sheet, 80 GB SXM"),
    "H100": Card(90, 64, 228 << 10, 3.35e12, _peaks(67, 495, 990), "NVIDIA H100 data sheet, SXM5"),
    "B200": Card(100, 64, 228 << 10, 8e12, _peaks(80, 1100, 2250),
                 "NVIDIA Blackwell Architecture Technical Brief, HGX B200"),
    "MI300X": Card("gfx942", 32, 64 << 10, 5.3e12, _peaks(163.4, 653.7, 1307.4), "AMD Instinct MI300X data sheet"),
}  # fmt: skip
REGISTERS = 65536


@dataclass(frozen=True)
class Launch:
    """A kernel with the signature of one launch."""

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[tuple[int, ...], Any]
    aligned: tuple[tuple[int, ...], ...]
    options: Mapping[str, int]
    grid: tuple[int, ...] = field(compare=False)
    numbers: Mapping[str, float] = field(compare=False)  # that it was given

    @cached_property
    def key(self) -> str:
        return repr((self.kernel.__name__, self.signature, self.constants, self.aligned, self.options))


@dataclass(frozen=True)
class Code:
    """What the compiler made of a launch.

    Args:
        registers: of a thread.
        stack: bytes of a thread that live in local memory.
        spills: loads from and stores to local memory.
        shared: bytes of shared memory of a program.
        products: instructions of tensor cores.
        loads: how many loads from memory read how many bytes at once, by thread.
    """

    registers: int
    stack: int
    spills: int
    shared: int
    warps: int
    products: int
    loads: Mapping[int, int]

    def occupancy(self, card: Card) -> float:
        """The share of a multiprocessor's warps that can be resident at once."""
        if card.amd:  # 512 registers of each lane of a SIMD, in portions of 8; waves on 4 SIMDs
            waves = 4 * min(8, 512 // max(8, -(-self.registers // 8) * 8))
            return min(waves // self.warps, card.shared // max(1, self.shared)) * self.warps / card.warps
        registers = -(-self.registers * 32 // 256) * 256 * self.warps  # given to a warp in portions of 256
        shared = self.shared + 1024  # which the system takes of each program
        programs = min(card.warps // self.warps, REGISTERS // max(1, registers), card.shared // shared)
        return programs * self.warps / card.warps


@dataclass(frozen=True)
class Pass:
    """One of PyTorch's own operations: the bytes of its inputs and outputs, and the FLOP of a product."""

    bytes: int
    flops: int
    dtype: str  # of the output


class Passes(TorchDispatchMode):
    """Collects PyTorch's own operations; views and fresh memory move no bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.passes: list[Pass] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.namespace == "polymix":  # its kernel is launched, and calls PyTorch, inside
            with self:
                return func._op_dk(torch._C.DispatchKey.CPU, *args, **kwargs)
        if func is torch.ops.aten.linear.default:  # under inference mode it comes whole
            with self:
                return func.decompose(*args, **kwargs)
        out = func(*args, **kwargs)
        alias = [result.alias_info for result in func._schema.returns]
        if not any(one is not None and not one.is_write for one in alias) and "empty" not in func.__name__:
            tensors = {id(t): t for t in tree_leaves((args, kwargs, out)) if isinstance(t, Tensor)}
            moved = sum(min(t.numel() * t.element_size(), t.untyped_storage().nbytes()) for t in tensors.values())
            count = flop_registry.get(func._overloadpacket)
            flops = count(*args, **kwargs, out_val=out) if count else 0
            dtype = str(out.dtype).removeprefix("torch.") if isinstance(out, Tensor) else ""
            self.passes.append(Pass(moved, flops, dtype))
        return out


@contextmanager
def caught(amd: bool = False) -> Iterator[tuple[list[Launch], list[Pass]]]:
    """Collect the launches made inside the context, and PyTorch's passes between them.

    No kernel runs: outputs are not written. With `amd`, the launches are those of a PyTorch for AMD's cards.
    """
    launches: list[Launch] = []

    def run(self: Any, *args: Any, grid: Any, warmup: bool = False, **kw: Any) -> None:
        launches.append(_launch(self, args, kw, grid))

    root = Path(polymix.ops.__file__).parent
    for file in root.rglob("triton*.py"):  # loaded now, they are compiled; loaded under the variable below, interpreted
        import_module(".".join(["polymix.ops", *file.relative_to(root).with_suffix("").parts]))
    with (
        mock.patch.object(JITFunction, "run", run),
        mock.patch("torch.cuda.device_of", return_value=nullcontext()),
        mock.patch.object(torch.version, "hip", "6.4" if amd else None),
        mock.patch.dict("os.environ", TRITON_INTERPRET="1"),  # launchers take tensors of the CPU
        Passes() as between,
    ):
        yield launches, between.passes


def _launch(kernel: Any, args: tuple[Any, ...], kw: dict[str, Any], grid: Any) -> Launch:
    """The signature by Triton's own rules: 1 is a constant, and multiples of 16 are told to the compiler."""
    options = {name: kw.pop(name) for name in ("num_warps", "num_stages") if name in kw}
    given = {**dict(zip((p.name for p in kernel.params), args, strict=False)), **kw}
    signature: dict[str, str] = {}
    constants: dict[tuple[int, ...], Any] = {}
    aligned: list[tuple[int, ...]] = []
    for at, parameter in enumerate(kernel.params):
        name = parameter.name
        value = given.get(name, parameter.default)
        constant = parameter.is_constexpr or value is None or isinstance(value, (str, bool))
        if constant or (isinstance(value, int) and value == 1 and not parameter.do_not_specialize):
            signature[name], constants[at,] = "constexpr", value
        elif isinstance(value, (Tensor, Described)):
            signature[name] = f"*{TYPES[value.dtype]}"
            if value.data_ptr() % 16 == 0:
                aligned.append((at,))
        elif isinstance(value, int):
            signature[name] = "i32" if abs(value) < 2**31 else "i64"
            if value % 16 == 0 and not parameter.do_not_specialize:
                aligned.append((at,))
        else:
            signature[name] = "fp32"
    numbers = {name: value for name, value in given.items() if isinstance(value, (int, float))}
    return Launch(kernel, signature, constants, tuple(aligned), options, tuple(grid), numbers)


@dataclass(frozen=True)
class Described:
    """A tensor of a launch that was written down: its dtype, and its address modulo 16."""

    dtype: torch.dtype
    address: int

    def data_ptr(self) -> int:
        return self.address


def read_launch(line: str) -> Launch:
    """A launch as `tests/benchmarks/launches.py` writes it down."""
    said = json.loads(line)
    arguments = {
        name: Described(getattr(torch, value["dtype"]), value["address"]) if isinstance(value, dict) else value
        for name, value in said["arguments"].items()
    }
    kernel = getattr(import_module(said["module"]), said["kernel"])
    return _launch(kernel, (), arguments, said["grid"])


def compiled(launch: Launch, card: Card) -> tuple[Code, str]:
    """Compile a launch for a card. Returns what became of it, and its first form (TTIR). Raises what Triton raises."""
    source = ASTSource(
        launch.kernel, dict(launch.signature), dict(launch.constants), dict.fromkeys(launch.aligned, ALIGNED)
    )
    built = triton.compile(source, target=card.target, options=dict(launch.options))
    return (_of_amd if card.amd else _of_nvidia)(built), built.asm["ttir"]


def _of_nvidia(built: Any) -> Code:
    ptx = built.asm["ptx"]
    said = _resources(built.asm["cubin"])
    loads = Counter[int]()
    for vector, bits in re.findall(r"\bld\.global(?:\.[a-z:_0-9]+)*?(?:\.v(\d))?\.[bfus](\d+)\b", ptx):
        loads[int(vector or 1) * int(bits) // 8] += 1
    for size in re.findall(r"\bcp\.async\.c[ag]\.shared\.global.*?, (0x\w+)", ptx):  # right to shared memory
        loads[int(size, 16)] += 1
    return Code(
        registers=said["REG"], stack=said["STACK"], spills=said["spills"],
        shared=built.metadata.shared, warps=built.metadata.num_warps,
        products=len(re.findall(r"\b(?:mma\.sync|wgmma\.mma|tcgen05\.mma)", ptx)), loads=dict(sorted(loads.items())),
    )  # fmt: skip


def _of_amd(built: Any) -> Code:
    """The same of AMD's assembly, whose metadata says what a kernel takes.

    Scalar registers are spilled to lanes of vector registers, not to memory: those are no spills here.
    """
    text = built.asm["amdgcn"]
    said = {name: int(number) for name, number in re.findall(r"^\s*-?\s*\.(\w+):\s+(\d+)\s*$", text, re.MULTILINE)}
    width = {"ubyte": 1, "ushort": 2, "dword": 4, "dwordx2": 8, "dwordx3": 12, "dwordx4": 16}
    loads = Counter(
        width[name] for name in re.findall(r"\b(?:global|buffer)_load_(dword(?:x\d)?|ubyte|ushort)\b", text)
    )
    return Code(
        registers=said["vgpr_count"], stack=said["private_segment_fixed_size"],
        spills=len(re.findall(r"\bscratch_(?:load|store)", text)), shared=built.metadata.shared,
        warps=built.metadata.num_warps, products=len(re.findall(r"\bv_mfma_", text)), loads=dict(sorted(loads.items())),
    )  # fmt: skip


def _resources(cubin: bytes) -> dict[str, int]:
    """Registers and bytes of stack that cuobjdump reads off machine code, and its loads and stores of local memory."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with TemporaryDirectory() as folder:
        file = Path(folder) / "kernel.cubin"
        file.write_bytes(cubin)
        said = subprocess.run([tool, "-res-usage", file], capture_output=True, text=True, check=True).stdout
        resources = {name: int(number) for name, number in re.findall(r"\b(REG|STACK):(\d+)", said)}
        code = ""
        if resources["STACK"]:  # otherwise there is no local memory, and reading the instructions takes seconds
            code = subprocess.run([tool, "-sass", file], capture_output=True, text=True, check=True).stdout
    return resources | {"spills": len(re.findall(r"\b(?:LDL|STL)\b", code))}
