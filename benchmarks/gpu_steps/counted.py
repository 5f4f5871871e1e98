"""Bytes and operations of a launch, counted in what Triton's compiler has left of the kernel.

The compiler's first form (TTIR) has each load, store, product and loop in it, with the shape of every tile, after what
nobody uses is gone. It is run here for all programs of the launch at once, without its data: integers (addresses,
masks, bounds of loops) are computed, numbers that come from memory are not. So the counts are those of this launch:
masked elements are not counted, and a loop counts as often as it runs.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
AT_ONCE = 1 << 22  # elements of the largest tile, of all programs that are run at once
BYTES = {"i1": 1, "i8": 1, "i16": 2, "i32": 4, "i64": 8, "f16": 2, "bf16": 2, "f32": 4, "f64": 8}
THREE = "tf32x3"  # a product in three of its kind


@dataclass
class Counts:
    """What a launch does.

    Args:
        read: bytes that it reads at least once. A second read may find them in a cache.
        written: bytes that it writes, likewise.
        requested: bytes of all loads and stores, repeated ones too.
        products: operations of products of tiles, two per multiply-add, by their element or, in float32, precision.
        others: operations on floating-point numbers beside them: sums, products, functions; a function counts as one.
    """

    read: int = 0
    written: int = 0
    requested: int = 0
    products: dict[str, int] = field(default_factory=dict)
    others: int = 0


@dataclass(frozen=True)
class Pointer:
    """Addresses: an argument of the kernel, and places in elements, (programs, *shape)."""

    argument: str
    places: Array


Value = Array | Pointer | None  # None for what depends on data; arrays are (programs or 1, *shape)


@dataclass(frozen=True)
class Step:
    """A line of the form: its name, results, operands, and the rest of the line; a loop has a body."""

    name: str
    results: tuple[str, ...]
    operands: tuple[str, ...]
    text: str
    body: tuple[Step, ...] = ()


def _divided(a: Array, b: Array) -> Array:
    return np.trunc(a / b).astype(a.dtype) if np.issubdtype(a.dtype, np.floating) else np.sign(a) * (np.abs(a) // b)


COMPARED: Mapping[str, Callable[..., Array]] = {
    "lt": np.less, "le": np.less_equal, "gt": np.greater, "ge": np.greater_equal, "eq": np.equal, "ne": np.not_equal
}  # fmt: skip
COMPUTED: Mapping[str, Callable[..., Array]] = {
    "arith.addi": np.add, "arith.subi": np.subtract, "arith.muli": np.multiply, "arith.minsi": np.minimum,
    "arith.maxsi": np.maximum, "arith.andi": np.bitwise_and, "arith.ori": np.bitwise_or, "arith.xori": np.bitwise_xor,
    "arith.divsi": _divided, "arith.remsi": lambda a, b: a - _divided(a, b) * b,
    "arith.addf": np.add, "arith.subf": np.subtract, "arith.mulf": np.multiply, "arith.divf": np.divide,
    "math.sqrt": np.sqrt, "arith.select": np.where,
    "arith.extsi": lambda a: a.astype(np.int64), "arith.extui": lambda a: a.astype(np.int64),
    "arith.trunci": lambda a: a.astype(np.int64), "arith.sitofp": lambda a: a.astype(np.float32),
    "arith.uitofp": lambda a: a.astype(np.float32), "arith.fptosi": lambda a: np.trunc(a).astype(np.int64),
}  # fmt: skip
# Operations on floating-point numbers that give numbers: conversions, choices and comparisons are none.
OPERATION = re.compile(r"arith\.(add|sub|mul|div|neg|maximum|minimum|maxnum|minnum)f$|math\.")


def parsed(text: str) -> tuple[tuple[str, ...], tuple[Step, ...]]:
    """The arguments of the kernel, and its steps."""
    lines = iter([re.sub(r"\s+loc\(.*$", "", line) for line in text.splitlines()])
    arguments: list[str] = []
    for line in lines:
        if "tt.func" in line:
            arguments = re.findall(r"%([\w.]+): ", text[text.index("tt.func") :].split("\n", 1)[0])
            break
    return tuple(arguments), tuple(_block(lines))


def _block(lines: Iterator[str]) -> Iterator[Step]:
    """The steps up to the brace that ends the block."""
    for line in lines:
        match = re.match(r'\s*(?:(%[\w.]+)(?::(\d+))? = )?"?([a-z]+\.[\w.]+)"?(.*)$', line)
        if match is None:
            if line.strip().startswith("}"):
                return
            continue
        result, count, name, text = match.groups()
        results = () if result is None else (result,) if count is None else tuple(
            f"{result}#{i}" for i in range(int(count))
        )  # fmt: skip
        body: tuple[Step, ...] = ()
        if name in ("tt.reduce", "tt.scan"):
            inside = []
            for inner in lines:
                if inner.strip().startswith("})"):
                    text += inner
                    break
                inside.append(inner)
            body = tuple(_block(iter(inside)))
        elif name == "scf.for":
            body = tuple(_block(lines))
        elif line.rstrip().endswith("{"):
            raise NotImplementedError(f"{name} has a block: only loops, sums and scans are counted")
        yield Step(name, results, tuple(re.findall(r"%[\w.]+(?:#\d+)?", text)), text, body)


def _type(text: str) -> tuple[tuple[int, ...], str]:
    """The shape and the element of the last type of a line."""
    last = re.findall(r"tensor<([^<>]*(?:<\w+>)?[^<>]*)>|(!tt\.ptr<\w+>|\b(?:i|f|bf)\d+\b|\bindex\b)", text)[-1]
    *shape, element = (last[0] or last[1]).split("x")
    return tuple(map(int, shape)), element


def _shaped(value: Array, shape: tuple[int, ...]) -> Array:
    return np.broadcast_to(value, (value.shape[0], *shape))


class Run:
    """The launch's programs, some at a time."""

    def __init__(self, arguments: Sequence[str], steps: Sequence[Step], values: Mapping[str, Any]) -> None:
        self.counts = Counts()
        self.steps, self.values, self.arguments = steps, values, arguments
        self.seen: dict[tuple[str, bool, int], Array] = {}

    def programs(self, ids: Sequence[Array], grid: Sequence[int]) -> None:
        self.ids, self.grid = ids, grid
        self.known: dict[str, Value] = {}
        for name in self.arguments:
            value = self.values.get(name)
            is_number = isinstance(value, (int, float))
            self.known[f"%{name}"] = np.array([value]) if is_number else Pointer(name, np.zeros(1, np.int64))
        self.active = np.ones(len(ids[0]), bool)
        for step in self.steps:
            self.do(step)

    def count(self, elements: int) -> int:
        """Elements of a tile, in all programs that are at this step."""
        return elements * int(self.active.sum())

    def do(self, step: Step) -> None:
        if step.name == "scf.for":
            self.loop(step)
            return
        operands = [self.known[name] for name in step.operands]
        if step.name in ("tt.load", "tt.store"):
            self.moved(step, operands)
        elif step.name == "tt.dot":
            self.multiplied(step)
        elif step.name in ("tt.reduce", "tt.scan"):
            self.folded(step)
        elif OPERATION.match(step.name):
            self.counts.others += self.count(math.prod(_type(step.text)[0]))
        if step.results:
            value = self.computed(step, operands)
            self.known.update(dict.fromkeys(step.results, value))

    def computed(self, step: Step, operands: list[Value]) -> Value:
        name, text = step.name, step.text
        if name == "arith.constant":
            return self.constant(text)
        if name in ("tt.get_program_id", "tt.get_num_programs"):
            axis = "xyz".index(text.split()[0])
            return self.ids[axis] if name == "tt.get_program_id" else np.array([self.grid[axis]])
        if name == "tt.make_range":
            end, start = (int(re.search(rf"{word} = (\d+)", text)[1]) for word in ("end", "start"))  # type: ignore[index]
            return np.arange(start, end)[None]
        if not operands or any(value is None for value in operands):
            return None
        if name == "tt.addptr":
            base, places = operands
            assert isinstance(base, Pointer) and isinstance(places, np.ndarray)
            return Pointer(base.argument, base.places + places)
        first = operands[0]
        if name in ("tt.splat", "tt.broadcast", "tt.expand_dims"):
            if isinstance(first, Pointer):
                return Pointer(first.argument, self.reshaped(name, text, first.places))
            assert first is not None
            return self.reshaped(name, text, first)
        if name == "arith.cmpi":
            return COMPARED[re.match(r"\s*[su]?(\w\w),", text)[1]](*operands)  # type: ignore[index]
        return COMPUTED[name](*operands) if name in COMPUTED else None

    def constant(self, text: str) -> Value:
        shape, element = _type(text)
        said = re.search(r"\s*(?:dense<)?([-\w.+]+)", text)[1]  # type: ignore[index]
        if element.startswith(("f", "bf")):
            number: Any = np.float32(np.nan if said.startswith("0x") else float(said))
        else:
            number = {"true": True, "false": False}.get(said)
            number = int(said) if number is None else number
        return np.full((1, *shape), number)

    def reshaped(self, name: str, text: str, value: Array) -> Array:
        shape = _type(text)[0]
        if name == "tt.expand_dims":
            axis = int(re.search(r"axis = (\d+)", text)[1])  # type: ignore[index]
            return np.expand_dims(value, axis + 1)
        return _shaped(value.reshape(-1, *(1,) * len(shape)) if name == "tt.splat" else value, shape)

    def moved(self, step: Step, operands: list[Value]) -> None:
        """Count what a load or a store moves."""
        pointer, store = operands[0], step.name == "tt.store"
        masked = len(operands) > (2 if store else 1)
        mask = operands[2 if store else 1] if masked else np.ones((1,), bool)
        if not isinstance(pointer, Pointer) or not isinstance(mask, np.ndarray):
            raise NotImplementedError(f"an address or a mask depends on data: {step.name}{step.text}")
        shape, element = _type(step.text)
        size = BYTES[re.sub(r"!tt\.ptr<(\w+)>", r"\1", element)]
        if not masked:
            mask = mask.reshape(1, *(1,) * len(shape))
        places, mask = np.broadcast_arrays(pointer.places, mask & self.active.reshape(-1, *(1,) * len(shape)))
        touched = places[mask]
        self.counts.requested += touched.size * size
        if not touched.size:
            return
        key, last = (pointer.argument, store, size), int(touched.max()) + 1
        seen = self.seen.get(key, np.zeros(0, bool))
        if len(seen) < last:
            self.seen[key] = seen = np.concatenate((seen, np.zeros(max(last, 2 * len(seen)) - len(seen), bool)))
        seen[touched] = True

    def multiplied(self, step: Step) -> None:
        shapes = re.findall(r"tensor<(\d+)x(\d+)x(\w+)>", step.text)
        rows, inner, element = int(shapes[0][0]), int(shapes[0][1]), shapes[0][2]
        precision = re.search(r"inputPrecision = (\w+)", step.text)
        kind = element if element != "f32" else precision[1] if precision else "ieee"
        operations = self.count(2 * rows * inner * int(shapes[1][1])) * (3 if kind == THREE else 1)
        self.counts.products[kind] = self.counts.products.get(kind, 0) + operations

    def folded(self, step: Step) -> None:
        """A sum of n numbers is n - 1 additions, a running sum at least as many."""
        shapes = re.findall(r"tensor<([\dx]+)x\w+>", step.text)
        shape = [int(part) for part in shapes[0].split("x")]
        axis = int(re.search(r"axis = (\d+)", step.text)[1])  # type: ignore[index]
        operations = sum(bool(OPERATION.match(inner.name)) for inner in step.body)
        self.counts.others += self.count(operations * math.prod(shape) // shape[axis] * (shape[axis] - 1))

    def loop(self, step: Step) -> None:
        """Run the body until the last program has ended; those that ended before are not counted."""
        match = re.match(r"\s*(%[\w.]+) = (%[\w.#]+) to (%[\w.#]+) step (%[\w.#]+)", step.text)
        assert match is not None
        index, low, high, by = match.groups()
        place, end, stride = (self.known[name] for name in (low, high, by))
        if any(not isinstance(bound, np.ndarray) for bound in (place, end, stride)):
            raise NotImplementedError(f"the bounds of a loop depend on data:{step.text}")
        carried = re.search(r"iter_args\((.*?)\) ->", step.text)
        names, values = [], []
        if carried:
            pairs = re.findall(r"(%[\w.]+) = (%[\w.#]+)", carried[1])
            names, values = [name for name, _ in pairs], [self.known[start] for _, start in pairs]
        outside = self.active
        while (active := outside & (place < end)).any():  # type: ignore[operator]
            self.active = active
            self.known.update({index: place, **dict(zip(names, values, strict=True))})
            for inner in step.body:
                if inner.name != "scf.yield":
                    self.do(inner)
            yielded = [self.known[name] for name in step.body[-1].operands] if names else []
            values = [self.kept(active, new, old) for new, old in zip(yielded, values, strict=True)]
            place = place + stride  # type: ignore[operator]
        self.active = outside
        self.known.update(dict(zip(step.results, values, strict=True)))

    def kept(self, active: Array, new: Value, old: Value) -> Value:
        """What a loop carries on: a program that has ended keeps its own. What is not known stays so."""
        if not isinstance(new, np.ndarray) or not isinstance(old, np.ndarray):
            return None
        return np.where(active.reshape(-1, *(1,) * (new.ndim - 1)), new, old)


def counted(text: str, values: Mapping[str, Any], grid: Sequence[int]) -> Counts:
    """Count in a kernel's TTIR, for the numbers that the launch gives it and its grid of programs.

    Raises NotImplementedError where an address, a mask or a loop depends on data.
    """
    arguments, steps = parsed(text)
    run, sizes = Run(arguments, steps, values), [*grid, 1, 1][:3]
    largest = max(
        (math.prod(map(int, shape.split("x"))) for shape in re.findall(r"tensor<([\dx]+)x[!\w]", text)), default=1
    )
    total, part = math.prod(sizes), max(1, AT_ONCE // largest)
    for begin in range(0, total, part):
        one = np.arange(begin, min(begin + part, total))
        run.programs((one % sizes[0], one // sizes[0] % sizes[1], one // sizes[0] // sizes[1]), sizes)
    for (_, store, size), seen in run.seen.items():
        if store:
            run.counts.written += size * int(seen.sum())
        else:
            run.counts.read += size * int(seen.sum())
    return run.counts
