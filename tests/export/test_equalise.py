"""Scales that move between layers before quantisation: the result stays, the ranges become equal."""

import numpy as np
import pytest
import torch
from torch import nn

import polymix

onnx = pytest.importorskip("onnx", reason="untested: quantised exports, for which onnx is needed (the export extra)")
pytest.importorskip("onnxruntime", reason="untested: quantised exports, for which onnxruntime is needed")

from polymix.export import int8  # noqa: E402
from polymix.export.equalise import Plan, equalised, part_fused_layers  # noqa: E402
from polymix.export.graph import Graph, write_onnx  # noqa: E402
from polymix.export.onnx_graphs import shapes_of  # noqa: E402
from tests.helpers import slow_but  # noqa: E402

DIM, TOKENS = 8, 16


class Residual(nn.Module):
    """x + W2 relu(W1 norm(x)): the branch may not be scaled at its end, and may be in its middle."""

    def __init__(self):
        super().__init__()
        self.norm, self.inner, self.outer = nn.LayerNorm(DIM), nn.Linear(DIM, 24), nn.Linear(24, DIM)

    def forward(self, x):
        return x + self.outer(self.inner(self.norm(x)).relu())


class Attention(nn.Module):
    """One head: the scores are a product of two scaled tensors that no constant follows."""

    def __init__(self):
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(DIM, DIM) for _ in range(4))

    def forward(self, x):
        scores = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(-1)
        return self.out(scores @ self.v(x))


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.own = nn.Conv1d(DIM, 12, 3, padding=1), nn.Conv1d(12, 12, 3, padding=1, groups=12)
        self.last = nn.Conv1d(12, DIM, 1)

    def forward(self, x):
        return self.last(self.own(self.first(x.transpose(1, 2))).relu()).transpose(1, 2)


def mixer(name, **options):
    return lambda: polymix.create_mixer(name, DIM, **options)


MODELS = {
    "padre-2": mixer("padre"), "padre-3": mixer("padre", degree=3), "padre-2d": mixer("padre", grid=(4, 4)),
    "poly_nl": mixer("poly_nl"), "pom": mixer("pom"), "qt": mixer("qt"), "linear": mixer("linear"),
    "residual": Residual, "attention": Attention, "convolutions": Convolutions,
}  # fmt: skip


@pytest.fixture(scope="module", params=slow_but(("padre-3", "qt", "attention", "residual"), MODELS))
def exported(request, tmp_path_factory):
    """A model with channels of very different sizes, as a float graph, with data for it."""
    torch.manual_seed(0)
    model = MODELS[request.param]().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.mul_(torch.exp(1.5 * torch.randn(len(parameter), *(1,) * (parameter.ndim - 1))))
    x = torch.randn(2, TOKENS, DIM)
    path = tmp_path_factory.mktemp("equalise") / "model.onnx"
    write_onnx(Graph("model", model, {"x": x}), path)
    with torch.no_grad():
        return request.param, onnx.load(path), [{"x": x.numpy()}], model(x).numpy()


def extremes(data):
    return lambda model, axes: int8.extremes(data, model, axes)


@pytest.mark.parametrize("strength", [0.0, 0.5, 1.0])
def test_the_result_stays(exported, strength):
    _, model, data, expected = exported
    changed = equalised(model, extremes(data), strength)
    tensors = int8._tensors(changed, [], data[0])
    (output,) = tensors.values()
    assert np.abs(output - expected).max() <= 2e-5 * np.abs(expected).max()
    onnx.checker.check_model(changed)


def spread(model, data):
    """For each scaled tensor: how unequal its channels' extremes are, as the deviation of their logarithms."""
    axes = {name: scaled.axis for name, scaled in Plan(model.graph, shapes_of(model)).scaled.items()}
    return {name: float(np.log(value).std()) for name, value in extremes(data)(model, axes).items() if value.min() > 0}


def test_ranges_become_more_equal(exported):
    name, model, data, _ = exported
    before, after = (spread(equalised(model, extremes(data), strength), data) for strength in (0.0, 1.0))
    changed = [tensor for tensor in before if abs(after[tensor] - before[tensor]) > 1e-3]
    total = sum(after[tensor] for tensor in changed), sum(before[tensor] for tensor in changed)
    if name in ("padre-2", "padre-3", "padre-2d", "residual", "convolutions", "poly_nl", "attention"):
        assert changed and total[0] < 0.8 * total[1]
    else:  # a function that is not linear lies between all layers of these
        assert not changed


def test_fused_layers_are_parted(exported):
    name, model, data, _ = exported
    changed = equalised(model, extremes(data), 0.0)
    before, after = (sum(node.op_type == "Split" for node in graph.node) for graph in (model.graph, changed.graph))
    if name in ("padre-2", "padre-3", "padre-2d", "poly_nl", "linear"):
        assert (before, after) == (1, 0)
    values = {part.name: list(part.dims) for part in changed.graph.initializer}
    part_fused_layers(changed)  # again: there is nothing more to part
    assert values == {part.name: list(part.dims) for part in changed.graph.initializer}


@pytest.mark.parametrize("exported", ["residual"], indirect=True)
def test_half_the_strength_moves_the_root(exported):
    _, model, data, _ = exported
    weights = []
    for strength in (0.0, 0.5, 1.0):
        graph = equalised(model, extremes(data), strength).graph
        parts = {part.name: onnx.numpy_helper.to_array(part) for part in graph.initializer}
        weights.append(parts["model.norm.weight"])
    np.testing.assert_allclose(weights[1] / weights[0], np.sqrt(weights[2] / weights[0]), rtol=1e-5)
    assert np.ptp(weights[2]) > 0.1


def graph_of(nodes, outputs, **weights):
    """A graph with the input x (1, 3, 3, 3), written by hand for what exporters rarely write."""
    tensor = onnx.helper.make_tensor_value_info
    graph = onnx.helper.make_graph(
        nodes, "hand", [tensor("x", 1, [1, 3, 3, 3])], [tensor(name, 1, None) for name in outputs],
        [onnx.numpy_helper.from_array(value, name) for name, value in weights.items()],
    )  # fmt: skip
    return onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10)


def by_hand(case):
    node, rng = onnx.helper.make_node, np.random.default_rng(0)
    weights = {"w": (rng.standard_normal((3, 3)) * [1, 10, 0.1]).astype(np.float32)}
    product = node("MatMul", ["x", "w"], ["y"], "product")
    sizes = {"sizes": np.array([1, 2])}
    if case == "split of another axis":  # as long as the last
        return graph_of([product, node("Split", ["y", "sizes"], ["a", "b"], axis=2)], ["a", "b"], **weights, **sizes)
    if case == "split and returned whole":
        nodes = [product, node("Split", ["y", "sizes"], ["a", "b"], axis=3)]
        return graph_of(nodes, ["y", "a", "b"], **weights, **sizes)
    if case == "rounded":
        nodes = [product, node("Cast", ["y"], ["whole"], to=6), node("Cast", ["whole"], ["z"], to=1)]
    else:  # read inside a branch
        tensor = onnx.helper.make_tensor_value_info
        branch = onnx.helper.make_graph([node("Exp", ["y"], ["z_in"])], "branch", [], [tensor("z_in", 1, None)])
        nodes = [product, node("If", ["yes"], ["z"], then_branch=branch, else_branch=branch)]
        weights["yes"] = np.array(True)
    return graph_of([*nodes, node("MatMul", ["z", "v"], ["out"])], ["out"], **weights, v=np.eye(3, dtype=np.float32))


@pytest.mark.parametrize("case", ["split of another axis", "split and returned whole", "rounded", "read in a branch"])
def test_the_result_stays_where_no_scale_may_move(case):
    model = by_hand(case)
    data = [{"x": np.random.default_rng(1).standard_normal((1, 3, 3, 3)).astype(np.float32)}]
    expected = int8._tensors(model, [], data[0])
    changed = equalised(model, extremes(data), 1.0)
    for name, value in int8._tensors(changed, [], data[0]).items():
        np.testing.assert_allclose(value, expected[name], rtol=1e-5, atol=1e-6, err_msg=name)
