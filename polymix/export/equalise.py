"""Equal ranges before quantisation: scales that move between neighbouring layers and leave the result as it is.

One range of 8 bits serves all channels of a tensor, so that a channel with small values gets few of its levels. Where
two layers stand in a row, channel c of the first may be multiplied by s_c > 0, and the second divide by it: in its
weights, or, in a Hadamard product, in those of the other factor (a scale moved from Y1 to Y2 changes nothing).

    y = W2 (W1 x)  =  (W2 S^-1) (S W1 x)             (W1 x) * (W2 x)  =  (S W1 x) * (S^-1 W2 x)

The scales of a graph make all ranges as equal as they can be: log s is the least-squares solution for the logarithms of
the channels' extremes, under the equations that keep the result (see `Plan`).
Source: Nagel et al. 2019 (arXiv:1906.04721), equation 7, for two layers; here for products, sums and whole graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from polymix.export.onnx_graphs import FLOAT, attribute, constant_numbers, count_of, read_by, shapes_of, uses_of

RATIO = 1e-3  # of a channel's range to the tensor's, below which it is taken for this
Terms = dict[int, int]  # a tensor's log scale: how often each free scale enters it
PASS_THROUGH = ("Identity", "Relu", "Neg", "MaxPool", "AveragePool", "GlobalAveragePool")


@dataclass(frozen=True)
class Scaled:
    """What a tensor is multiplied by: exp of a sum of free log scales, along an axis counted from the end."""

    axis: int
    terms: Mapping[int, int]


@dataclass
class Plan:
    """Where scales can be put in a graph, found by walking through it in order.

    Products with constant weights and convolutions take any scale of their input away, in their weights, and give a
    new one to their output, as the weights of a norm do. Operators between them pass scales on, add their logarithms
    (Mul) or demand that two are equal (Add). All others, and the graph's outputs, demand that there is none.

    sizes: channels of each free scale. scaled: tensors by name. equations: terms that must add up to zero.
    weights: for each layer, by the place of its node: the input's scale and the free scale of its output.
    followers: constants that are multiplied by a tensor's scale, such as biases, and how many axes of theirs follow
    the channels'.
    """

    graph: Any
    shapes: Mapping[str, Sequence[Any]]
    sizes: list[int] = field(default_factory=list)
    scaled: dict[str, Scaled] = field(default_factory=dict)
    equations: list[Terms] = field(default_factory=list)
    weights: dict[int, tuple[Scaled | None, int]] = field(default_factory=dict)
    followers: list[tuple[str, Scaled, int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        uses = uses_of(self.graph)
        self.constants = {part.name for part in self.graph.initializer}
        self.own = {name for name in self.constants if uses[name] == 1}
        self.numbers = dict(constant_numbers(self.graph))
        for place, node in enumerate(self.graph.node):
            walk = RULES.get(node.op_type, Plan.refuse)
            if not all(name in self.shapes for name in [*node.input, *node.output] if name):
                walk = Plan.refuse
            walk(self, node, place)
        for output in self.graph.output:
            self.end(output.name)

    def end(self, name: str) -> None:
        """Demand that a tensor has no scale."""
        if name in self.scaled:
            self.equations.append(dict(self.scaled.pop(name).terms))

    def layer(self, node: Any, place: int, axis: int, size: int, bias: str) -> None:
        """A node with weights: its input's scale ends in them, its output has one of its own."""
        scale = self.scaled.get(node.input[0])
        if scale is not None and scale.axis != axis:
            self.end(node.input[0])
            scale = None
        self.sizes.append(size)
        self.weights[place] = (scale, len(self.sizes) - 1)
        made = self.scaled[node.output[0]] = Scaled(axis, {len(self.sizes) - 1: 1})
        if bias:
            self.followers.append((bias, made, 0))

    def channels(self, name: str) -> int:
        return self.shapes[name][self.scaled[name].axis]

    # ---- by operator

    def refuse(self, node: Any, place: int) -> None:
        for name in read_by(node):
            self.end(name)

    def matmul(self, node: Any, place: int) -> None:
        left, right = node.input
        if right in self.own and len(self.shapes[right]) == 2 and left not in self.constants:
            self.layer(node, place, -1, self.shapes[right][1], "")
            return
        scale: Scaled | None = None
        if right in self.scaled and left not in self.scaled and self.scaled[right].axis == -1:
            scale = self.scaled[right]
        elif left in self.scaled and right not in self.scaled and self.scaled[left].axis == -2:
            scale = self.scaled[left]
        if scale is None:
            self.refuse(node, place)
        else:
            self.scaled[node.output[0]] = scale

    def convolution(self, node: Any, place: int) -> None:
        data, weight, bias = [*node.input, ""][:3]
        shape, groups = self.shapes[weight], attribute(node, "group", 1)
        ours = weight in self.own and (not bias or bias in self.own) and data not in self.constants
        if not ours or (groups > 1 and (shape[1] != 1 or shape[0] != groups)):
            self.refuse(node, place)
        else:
            self.layer(node, place, 1 - len(self.shapes[data]), shape[0], bias)

    def norm(self, node: Any, place: int) -> None:
        """A norm's own weight and bias scale its output; its input is measured, and keeps its values."""
        self.end(node.input[0])
        rank, weight = len(self.shapes[node.output[0]]), node.input[1]
        if attribute(node, "axis", -1) % rank == rank - 1 and all(name in self.own for name in node.input[1:]):
            self.layer(node, place, -1, self.shapes[weight][0], [*node.input, ""][2])

    def sum(self, node: Any, place: int) -> None:
        if not self.with_constant(node, follow=True):
            left, right = (self.scaled.get(name) for name in node.input)
            if left is None or right is None or left.axis != right.axis or not self.same_channels(node):
                self.refuse(node, place)
                return
            self.equations.append(_added(left.terms, right.terms, -1))
            self.scaled[node.output[0]] = left

    def product(self, node: Any, place: int, sign: int = 1) -> None:
        if not self.with_constant(node, follow=False):
            present = [name for name in node.input if name in self.scaled]
            if not present:
                return
            if any(self.scaled[name].axis != self.scaled[present[0]].axis for name in present) or (
                not self.same_channels(node)
            ):
                self.refuse(node, place)
                return
            left, right = (self.scaled[name].terms if name in self.scaled else {} for name in node.input)
            self.scaled[node.output[0]] = Scaled(self.scaled[present[0]].axis, _added(left, right, sign))

    def quotient(self, node: Any, place: int) -> None:
        self.product(node, place, -1)

    def with_constant(self, node: Any, follow: bool) -> bool:
        """A sum or product of a tensor and a constant, which for a sum takes the tensor's scale too."""
        names = [name for name in node.input if name in self.scaled]
        others = [name for name in node.input if name in self.constants]
        if len(names) != 1 or len(others) != 1 or (node.op_type == "Div" and node.input[0] in self.constants):
            return False
        scaled, name = self.scaled[names[0]], others[0]
        if self.shapes[node.output[0]][scaled.axis] != self.channels(names[0]) or (follow and name not in self.own):
            return False
        if follow:
            self.followers.append((name, scaled, -1 - scaled.axis))
        self.scaled[node.output[0]] = scaled
        return True

    def same_channels(self, node: Any) -> bool:
        """Whether no factor is repeated along the channels of another."""
        axis = next(self.scaled[name].axis for name in node.input if name in self.scaled)
        size = self.shapes[node.output[0]][axis]
        return all(self.channels(name) == size for name in node.input if name in self.scaled)

    def cast(self, node: Any, place: int) -> None:
        """To float32 it changes nothing; other types round, or only tell whether a value is zero."""
        (self.same if attribute(node, "to", 0) == FLOAT else self.refuse)(node, place)

    def same(self, node: Any, place: int) -> None:
        if node.input[0] in self.scaled:
            self.scaled[node.output[0]] = self.scaled[node.input[0]]

    def transpose(self, node: Any, place: int) -> None:
        if scale := self.scaled.get(node.input[0]):
            rank = len(self.shapes[node.input[0]])
            order = attribute(node, "perm", list(range(rank))[::-1])
            self.scaled[node.output[0]] = Scaled(order.index(scale.axis + rank) - rank, scale.terms)

    def reshape(self, node: Any, place: int) -> None:
        """A scale stays where the channels remain one axis, with as many values after it."""
        if scale := self.scaled.get(node.input[0]):
            before, after = self.shapes[node.input[0]], self.shapes[node.output[0]]
            size, rest = before[scale.axis], count_of(before[scale.axis + len(before) + 1 :])
            for axis in range(-len(after), 0):
                if after[axis] == size and rest is not None and count_of(after[axis + len(after) + 1 :]) == rest:
                    self.scaled[node.output[0]] = Scaled(axis, scale.terms)
                    return
            self.refuse(node, place)

    def reduce(self, node: Any, place: int) -> None:
        if scale := self.scaled.get(node.input[0]):
            before, after = self.shapes[node.input[0]], self.shapes[node.output[0]]
            axes = self.axes(node, len(before))
            if axes is None or scale.axis + len(before) in axes:
                self.refuse(node, place)
            else:
                gone = [] if len(after) == len(before) else [axis for axis in axes if axis > scale.axis + len(before)]
                self.scaled[node.output[0]] = Scaled(scale.axis + len(gone), scale.terms)

    def axes(self, node: Any, rank: int) -> list[int] | None:
        """The axes of a reduction, where they are constant."""
        axes = self.numbers.get(node.input[1]) if len(node.input) > 1 else None
        return None if axes is None else [axis % rank for axis in axes]


RULES: dict[str, Callable[[Plan, Any, int], None]] = {
    "MatMul": Plan.matmul, "Conv": Plan.convolution, "LayerNormalization": Plan.norm, "Add": Plan.sum,
    "Sub": Plan.sum, "Mul": Plan.product, "Div": Plan.quotient, "Transpose": Plan.transpose, "Reshape": Plan.reshape,
    "Squeeze": Plan.reshape, "Unsqueeze": Plan.reshape, "ReduceSum": Plan.reduce, "ReduceMean": Plan.reduce,
    "Cast": Plan.cast,
    **dict.fromkeys(PASS_THROUGH, Plan.same),
}  # fmt: skip


def equalised(model: Any, extremes: Callable[[Any, Mapping[str, int]], Mapping[str, np.ndarray]],
              strength: float = 1.0) -> Any:  # fmt: skip
    """A copy of an ONNX model with nearly equal ranges of its channels, and with fused layers apart.

    Args:
        model: an onnx.ModelProto with its weights. extremes: from a model and its tensors' names with the channels'
            axes to the largest absolute value of each channel on the data. strength: 1 makes ranges as equal as they
            can be; 0 moves no scale; between, part of it stays in the activations and part in the weights.
    """
    import onnx

    changed = onnx.ModelProto()
    changed.CopyFrom(model)
    part_fused_layers(changed)
    if strength == 0:
        return changed
    plan = Plan(changed.graph, shapes_of(changed))
    largest = extremes(changed, {name: scaled.axis for name, scaled in plan.scaled.items()})
    _apply(plan, [strength * scale for scale in solve(plan, largest)])
    return changed


def part_fused_layers(model: Any) -> None:
    """Replace a product whose output is split into parts by a product for each part, with a range of its own."""
    from onnx import helper, numpy_helper

    graph, shapes, uses = model.graph, shapes_of(model), uses_of(model.graph)
    numbers = dict(constant_numbers(graph))
    makers = {output: node for node in graph.node for output in node.output}
    values = {part.name: part for part in graph.initializer}
    for split in [node for node in graph.node if node.op_type == "Split"]:
        chain: list[Any] = [makers.get(split.input[0])]
        if chain[0] is not None and chain[0].op_type == "Add":
            chain.insert(0, makers.get(next((name for name in chain[0].input if name not in values), "")))
        product = chain[0]
        if product is None or product.op_type != "MatMul" or product.input[1] not in values:
            continue
        constants = [name for node in chain for name in node.input if name in values]
        weight = numpy_helper.to_array(values[product.input[1]])
        bias = None if len(chain) == 1 else numpy_helper.to_array(values[constants[1]])
        alone = all(uses[name] == 1 for name in [*constants, *(node.output[0] for node in chain)])
        fits = weight.ndim == 2 and (bias is None or bias.shape == weight.shape[1:])
        last = attribute(split, "axis", 0) in (-1, len(shapes.get(split.input[0], ())) - 1)
        if not (alone and fits and last) or (sizes := _parts(split, numbers, weight.shape[-1])) is None:
            continue
        made, start = [], 0
        for name, size in zip(split.output, sizes, strict=True):
            parts = [weight[:, start : start + size], *([] if bias is None else [bias[start : start + size]])]
            names = [f"{constant}.{start}" for constant in constants]
            graph.initializer.extend(
                numpy_helper.from_array(np.ascontiguousarray(part), own) for own, part in zip(names, parts, strict=True)
            )
            output = name if bias is None else f"{name}.product"
            made.append(helper.make_node("MatMul", [product.input[0], names[0]], [output], f"{product.name}.{start}"))
            if bias is not None:
                made.append(helper.make_node("Add", [output, names[1]], [name], f"{chain[1].name}.{start}"))
            start += size
        place = list(graph.node).index(product)
        for node in [*chain, split]:
            graph.node.remove(node)
        for offset, node in enumerate(made):
            graph.node.insert(place + offset, node)
        for constant in constants:
            graph.initializer.remove(values[constant])


def _parts(split: Any, numbers: Mapping[str, list[int]], size: int) -> list[int] | None:
    """The sizes into which a Split cuts an axis of a size; None: they are not constant."""
    if len(split.input) > 1 and split.input[1]:
        return numbers.get(split.input[1])
    each = -(-size // len(split.output))
    return [each] * (len(split.output) - 1) + [size - each * (len(split.output) - 1)]


def solve(plan: Plan, extremes: Mapping[str, np.ndarray]) -> list[np.ndarray]:
    """The free log scales, one value a channel, that make the extremes of each tensor's channels most equal."""
    result = [np.zeros(size) for size in plan.sizes]
    rows: dict[tuple[tuple[int, int], ...], np.ndarray] = {}  # tensors with the same scale have one row
    for name, scaled in plan.scaled.items():
        if name in extremes and scaled.terms:
            key, largest = tuple(sorted(scaled.terms.items())), np.asarray(extremes[name], np.float64)
            rows[key] = np.maximum(rows[key], largest) if key in rows else largest
    for group in _groups(len(plan.sizes), [*plan.equations, *map(dict, rows)]):
        places = {variable: place for place, variable in enumerate(group)}
        own = {key: value for key, value in rows.items() if key[0][0] in places}
        if not own:
            continue
        free = _null_space([_row(terms, places) for terms in plan.equations if set(terms) & set(group)], len(group))
        logs = np.stack([_log(value) for value in own.values()])
        logs -= logs.mean(1, keepdims=True)
        matrix = np.stack([_row(dict(key), places) for key in own]) @ free
        scales = free @ np.linalg.lstsq(matrix, -logs, rcond=1e-9)[0]
        for variable, place in places.items():
            result[variable] = scales[place]
    return result


def _log(extremes: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(extremes, max(float(extremes.max(initial=0.0)), 1e-30) * RATIO))


def _apply(plan: Plan, scales: Sequence[np.ndarray]) -> None:
    from onnx import numpy_helper

    values = {part.name: part for part in plan.graph.initializer}
    changed: dict[str, np.ndarray] = {}

    def weight_of(name: str) -> np.ndarray:
        return numpy_helper.to_array(values[name]).astype(np.float64)

    def factor(scaled: Scaled | None) -> np.ndarray | float:
        return float(1) if scaled is None else np.exp(sum(n * scales[v] for v, n in scaled.terms.items()))

    for place, (incoming, made) in plan.weights.items():
        node, before, scale = plan.graph.node[place], factor(incoming), np.exp(scales[made])
        weight = weight_of(node.input[1])
        if node.op_type == "MatMul":
            weight = weight * scale / np.reshape(before, (-1, 1))
        elif node.op_type == "LayerNormalization":
            weight = weight * scale
        else:
            inner = (1,) * (weight.ndim - 2)
            own = attribute(node, "group", 1) > 1  # a filter for each channel
            weight = (
                weight * scale.reshape(-1, 1, *inner) / np.reshape(before, (-1, 1, *inner) if own else (1, -1, *inner))
            )
        changed[node.input[1]] = weight
    for name, scaled, after in plan.followers:
        changed[name] = weight_of(name) * np.reshape(factor(scaled), (-1, *(1,) * after))
    for name, value in changed.items():
        values[name].CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value.astype(np.float32)), name))
    for part in [part for part in plan.graph.value_info if part.name in changed]:
        plan.graph.value_info.remove(part)  # a number that was added to all channels has become one for each


def _added(left: Mapping[int, int], right: Mapping[int, int], sign: int) -> Terms:
    both = {variable: left.get(variable, 0) + sign * right.get(variable, 0) for variable in {*left, *right}}
    return {variable: times for variable, times in sorted(both.items()) if times}


def _row(terms: Mapping[int, int], places: Mapping[int, int]) -> np.ndarray:
    row = np.zeros(len(places))
    for variable, times in terms.items():
        row[places[variable]] = times
    return row


def _null_space(rows: Sequence[np.ndarray], size: int) -> np.ndarray:
    """Columns that span the solutions of the equations."""
    if not rows:
        return np.eye(size)
    _, values, vectors = np.linalg.svd(np.stack(rows))
    return vectors[int((values > 1e-9).sum()) :].T


def _groups(count: int, links: Sequence[Mapping[int, int]]) -> Iterator[list[int]]:
    """Free scales that are joined by a tensor or an equation; they have the same number of channels."""
    parent = list(range(count))

    def root(variable: int) -> int:
        while parent[variable] != variable:
            variable = parent[variable]
        return variable

    for link in links:
        for variable in link:
            parent[root(variable)] = root(next(iter(link)))
    groups: dict[int, list[int]] = {}
    for variable in range(count):
        groups.setdefault(root(variable), []).append(variable)
    yield from groups.values()
