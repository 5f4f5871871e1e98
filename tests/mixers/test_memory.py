"""Memory of a forward without gradients, by the allocations that PyTorch makes."""

import math

import pytest
import torch

import polymix
from polymix.measure import peak_memory

N, D = 16384, 64


def held(mixer, x):
    """Most bytes at once beyond input, weights and output."""
    with torch.inference_mode():
        mixer(x)  # what is made once, such as folded weights
        out = []
        peak = peak_memory(lambda: out.append(mixer(x)))
    return peak - out[0].numel() * out[0].element_size()


def largest(mixer, itemsize):
    """Bytes of the largest operand or output of the floor's products."""

    def parts(op):
        if op.kind == "linear":
            rows, inside, outside, _ = op.shape
            return rows * inside, rows * outside
        if op.kind == "matmul":
            batch, m, k, n = op.shape
            return batch * m * k, batch * k * n, batch * m * n
        assert op.kind == "depthwise"
        return (math.prod(op.shape) * op.dim,)

    return itemsize * max(size for op in mixer.cost(N).ops for size in parts(op)) + weights(mixer)


def weights(mixer):
    """Bytes of the parameters: products and other layouts of them count as weights."""
    return sum(p.numel() * p.element_size() for p in mixer.parameters())


def of_torch(dtype):
    """Bytes that PyTorch's own product (N, D) · (D, D) holds beside its output: float32 sums of bf16 where the processor
    has no such products, which no mixer can avoid."""
    weight = torch.randn(D, D, dtype=dtype)
    return held(lambda x: x @ weight, torch.randn(1, N, D, dtype=dtype))


CASES = {
    "pom": ("pom", {}), "pom-4": ("pom", {"degree": 4, "expand": 4}), "qt": ("qt", {"heads": 2}),
    "qt-full": ("qt", {"heads": 4, "form": "full"}), "poly_sa": ("poly_sa", {"heads": 2, "grid": (128, 128)}),
    "poly_sa-mean": ("poly_sa", {"positions": "mean"}), "poly_nl": ("poly_nl", {}), "poly_nl-2": ("poly_nl", {"reduction": 2}),
}  # fmt: skip


@pytest.mark.usefixtures("bf16_products")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", list(CASES))
def test_no_more_than_the_largest_intermediate_of_the_floor(case, dtype):
    name, options = CASES[case]
    mixer = polymix.create_mixer(name, D, dtype=dtype, **options)
    got = held(mixer, torch.randn(1, N, D, dtype=dtype))
    allowed = largest(mixer, dtype.itemsize) + of_torch(dtype)
    assert got <= allowed, f"{got:,} bytes beside the output, {allowed:,} allowed"


@pytest.mark.parametrize("folded", [False, True])
@pytest.mark.parametrize("options", [{}, {"preset": "full"}, {"weight": "channel", "constant": "channel"}], ids=str)
@pytest.mark.parametrize("degree", [1, 2, 3, 4])
@pytest.mark.parametrize("grid", [(128, 128), (N,)])
def test_padre_holds_at_most_two_arrays_a_degree(grid, degree, options, folded):
    mixer = polymix.create_mixer("padre", D, degree=degree, grid=grid, kernel_size=5, **options)
    got, allowed = (
        held(mixer.fold() if folded else mixer, torch.randn(1, N, D)),
        2 * N * D * 4 * degree + weights(mixer),
    )
    assert got <= allowed, f"{got:,} bytes beside the output, {allowed:,} allowed"
