"""The depthwise convolution and its backward against those of PyTorch."""

import math

import pytest
import torch
import torch.nn.functional as F

from polymix.ops.shared.depthwise import depthwise_conv, effective_kernel
from tests.helpers import close, tokens

CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SIZES = [(grid, kernel, False) for grid, kernel in [
    ((1,), (11,)), ((63,), (11,)), ((100,), (3,)), ((257,), (11,)), ((257,), (1,)),
    ((1, 1), (11, 11)), ((7, 9), (3, 5)), ((10, 10), (11, 11)), ((1, 257), (11, 11)), ((3, 2), (1, 11)),
    ((1, 1, 1), (3, 3, 3)), ((4, 5, 5), (3, 5, 3)), ((2, 3, 4), (11, 11, 11)),
]] + [((n,), (k,), True) for n, k in [(1, 1), (1, 11), (63, 4), (100, 11), (257, 2)]]  # fmt: skip
every_size = pytest.mark.parametrize(("grid", "kernel", "causal"), SIZES, ids=str)


def conv(x, weight, grid, causal):
    return depthwise_conv(x, weight, grid, causal=causal)


def plain(x, weight, grid, causal=False):
    """The same with PyTorch's convolution and autograd."""
    image = x.transpose(1, 2)
    image = image if causal else image.unflatten(2, grid)
    padding = 0 if causal else tuple(k // 2 for k in weight.shape[2:])
    return CONV[len(grid)](image, weight, padding=padding, groups=x.shape[2]).flatten(2).transpose(1, 2)


def inputs(grid, kernel, causal, dim=60, batch=2):
    n = math.prod(grid)
    x = tokens(batch, n + (kernel[0] - 1 if causal else 0), dim)
    return x, tokens(dim, 1, *kernel, seed=1), tokens(batch, n, dim, seed=2)


def run(conv, dtype, x, weight, cotangent, *options):
    """The output, and the gradients of the input and the weight."""
    x, weight = (tensor.detach().to(dtype).requires_grad_() for tensor in (x, weight))
    y = conv(x, weight, *options)
    return y, *torch.autograd.grad(y, (x, weight), cotangent.to(dtype))


@every_size
def test_float64_to_the_last_digits(grid, kernel, causal):
    data = inputs(grid, kernel, causal)
    for ours, theirs in zip(*(run(f, torch.float64, *data, grid, causal) for f in (conv, plain)), strict=True):
        assert ours.shape == theirs.shape
        close(ours, theirs, 1e-12)


@every_size
def test_float32_and_bfloat16_against_float64(grid, kernel, causal):
    data = inputs(grid, kernel, causal)
    exact = run(plain, torch.float64, *data, grid, causal)
    for ours, true in zip(run(conv, torch.float32, *data, grid, causal), exact, strict=True):
        assert ours.dtype == torch.float32
        close(ours.double(), true, 1e-4)
    low, theirs = (run(f, torch.bfloat16, *data, grid, causal) for f in (conv, plain))
    for ours, plainly, true in zip(low, theirs, exact, strict=True):
        assert ours.dtype == torch.bfloat16
        error = (plainly.double() - true).abs().max() / true.abs().max()
        close(ours.double(), true, 2 * error.item())


def test_bfloat16_weight_gradient_of_samples_that_cancel():
    """The sum over samples that cancel is not rounded in between."""
    x, weight, cotangent = inputs((63,), (11,), False)
    x = x[:1].expand_as(x).bfloat16().double()
    cotangent = torch.stack((cotangent[0], 0.01 * cotangent[1] - cotangent[0])).bfloat16().double()
    data = x, weight.bfloat16().double(), cotangent
    true, plainly = (run(plain, dtype, *data, (63,), False)[2].double() for dtype in (torch.float64, torch.bfloat16))
    error = (plainly - true).abs().max() / true.abs().max()
    close(run(conv, torch.bfloat16, *data, (63,), False)[2].double(), true, 2 * error.item())


def test_results_are_identical_without_gradients():
    x, weight, _ = inputs((7, 9), (3, 5), False)
    with torch.no_grad():
        y = depthwise_conv(x, weight, (7, 9))
    assert torch.equal(y, depthwise_conv(x.requires_grad_(), weight, (7, 9)))


SMALL = [  # including a sequence that is shorter than half the kernel
    ((5,), (3,), False), ((4,), (4,), True), ((1,), (5,), False), ((3, 2), (3, 5), False),
    ((2, 2, 2), (3, 3, 1), False),
]  # fmt: skip


@pytest.mark.parametrize(("grid", "kernel", "causal"), SMALL, ids=str)
@pytest.mark.parametrize("check", [torch.autograd.gradcheck, torch.autograd.gradgradcheck])
def test_gradcheck(check, grid, kernel, causal):
    x, weight, _ = inputs(grid, kernel, causal, dim=2)
    assert check(lambda x, w: conv(x, w, grid, causal), (x.requires_grad_(), weight.requires_grad_()), fast_mode=True)


@pytest.mark.parametrize(("grid", "kernel", "causal"), SMALL, ids=str)
def test_third_derivative(grid, kernel, causal):
    """The third derivative of a cubic, because the backward of the backward is differentiable too."""
    x, weight, _ = inputs(grid, kernel, causal, dim=2)

    def third(f):
        leaves = (x.detach().requires_grad_(), weight.detach().requires_grad_())
        value = f(*leaves, grid, causal).pow(3).sum()
        for _ in range(3):
            value = sum(g.square().sum() for g in torch.autograd.grad(value, leaves, create_graph=True))
        return value

    close(third(conv), third(plain), 1e-12)


@pytest.mark.parametrize(("grid", "kernel", "causal"), SMALL, ids=str)
def test_vmap_of_grad(grid, kernel, causal):
    """Gradients per sample, of the input and of the weight, equal a loop over the samples."""
    x, weight, _ = inputs(grid, kernel, causal, dim=3, batch=4)

    def loss(x, weight):
        return conv(x[None], weight, grid, causal).pow(3).sum()

    gradient = torch.func.grad(loss, argnums=(0, 1))
    together = torch.func.vmap(gradient, in_dims=(0, None))(x, weight)
    apart = [gradient(row, weight) for row in x]
    for ours, rows in zip(together, zip(*apart, strict=True), strict=True):
        close(ours, torch.stack(rows), 1e-12)


def test_vmap_over_weights():
    x, _, _ = inputs((7, 9), (3, 5), False, dim=3)
    weights = tokens(4, 3, 1, 3, 5, seed=3)
    together = torch.func.vmap(lambda w: depthwise_conv(x, w, (7, 9)))(weights)
    close(together, torch.stack([plain(x, w, (7, 9)) for w in weights]), 1e-12)


LAYOUTS = {
    "transposed": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
    "batch inside": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "sliced": lambda x: torch.stack((x, x + 1), 2).flatten(1, 2)[:, ::2],
    "channels of a wider": lambda x: torch.cat((x + 1, x, x + 2), 2)[:, :, x.shape[2] : 2 * x.shape[2]],
    "expanded": lambda x: x[:1].expand_as(x),
}


@pytest.mark.parametrize("layout", list(LAYOUTS))
@pytest.mark.parametrize(("grid", "kernel", "causal"), [
    ((63,), (11,), False), ((63,), (4,), True), ((7, 9), (3, 5), False), ((2, 3, 4), (3, 3, 3), False),
])  # fmt: skip
def test_layouts(layout, grid, kernel, causal):
    """Any memory layout of the input, the weight and the output's gradient."""
    x, weight, cotangent = inputs(grid, kernel, causal)
    move = LAYOUTS[layout]
    data = (move(x), weight.flip(-1).flip(-1), move(cotangent))

    def leave(f):
        base, w = data[0].clone().requires_grad_(), data[1].clone().requires_grad_()
        y = f(move(base), w, grid, causal)
        return y, *torch.autograd.grad(y, (base, w), data[2])

    for ours, theirs in zip(leave(conv), leave(plain), strict=True):
        close(ours, theirs, 1e-12)


@pytest.mark.parametrize(("grid", "kernel", "causal"), SMALL, ids=str)
def test_compile_without_breaks(grid, kernel, causal):
    torch._dynamo.reset()  # otherwise the second shape would be compiled as dynamic
    data = inputs(grid, kernel, causal, dim=6)
    compiled = torch.compile(conv, fullgraph=True, backend="aot_eager")
    for ours, theirs in zip(*(run(f, torch.float64, *data, grid, causal) for f in (compiled, conv)), strict=True):
        close(ours, theirs, 1e-12)


def test_compile_any_length():
    """One graph for every length of a sequence; the kernel is not cropped to the length."""

    def whole(x, weight):
        return depthwise_conv(x, weight, (x.shape[1],))

    compiled = torch.compile(whole, fullgraph=True, dynamic=True, backend="aot_eager")
    for n in (5, 63, 100):
        data = inputs((n,), (11,), False, dim=6)
        for ours, theirs in zip(*(run(f, torch.float64, *data) for f in (compiled, whole)), strict=True):
            close(ours, theirs, 1e-12)


@pytest.mark.parametrize(("grid", "kernel", "causal"), [
    ((63,), (11,), False), ((63,), (4,), True), ((7, 9), (3, 5), False),
])  # fmt: skip
def test_autocast(grid, kernel, causal):
    """It computes in autocast's dtype; gradients of parameters have the parameters' dtype."""
    x, weight, cotangent = (tensor.float() for tensor in inputs(grid, kernel, causal))
    x, weight = x.requires_grad_(), weight.requires_grad_()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = conv(x, weight, grid, causal)
    assert y.dtype == torch.bfloat16
    grads = torch.autograd.grad(y, (x, weight), cotangent.bfloat16())
    assert all(grad.dtype == torch.float32 for grad in grads)
    for ours, true in zip((y, *grads), run(plain, torch.float32, x, weight, cotangent, grid, causal), strict=True):
        close(ours.float(), true, 0.02)


def test_autocast_leaves_float64_alone():
    """PyTorch's own convolution does the same."""
    x, weight, _ = inputs((63,), (11,), False)
    y = depthwise_conv(x, weight, (63,))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert plain(x, weight, (63,)).dtype == torch.float64
        close(depthwise_conv(x, weight, (63,)).double(), y, 1e-12)


def test_meta_device():
    x, weight, _ = inputs((7, 9), (3, 5), False)
    assert depthwise_conv(x.to("meta"), weight.to("meta"), (7, 9)).shape == x.shape


@pytest.mark.parametrize(("grid", "kernel", "causal"), [
    ((5,), (3,), False), ((5,), (3,), True), ((3, 4), (3, 3), False),
])  # fmt: skip
def test_an_empty_batch(grid, kernel, causal):
    data = inputs(grid, kernel, causal, batch=0)
    y, grad_x, grad_w = run(conv, torch.float64, *data, grid, causal)
    assert y.shape == data[2].shape
    assert grad_x.shape == data[0].shape
    assert not grad_w.any()


def test_only_requested_gradients_are_computed():
    x, weight, cotangent = inputs((7, 9), (3, 5), False)
    (alone,) = torch.autograd.grad(depthwise_conv(x.requires_grad_(), weight, (7, 9)), x, cotangent)
    close(alone, run(plain, torch.float64, x, weight, cotangent, (7, 9))[1], 1e-12)
    (alone,) = torch.autograd.grad(depthwise_conv(x.detach(), weight.requires_grad_(), (7, 9)), weight, cotangent)
    close(alone, run(plain, torch.float64, x, weight, cotangent, (7, 9))[2], 1e-12)


def test_effective_kernel():
    assert effective_kernel((11, 11), (1, 64)) == (1, 11)
    assert effective_kernel((11, 3, 5), (5, 1, 2)) == (9, 1, 3)
    assert effective_kernel((11,), (2,)) == (11,), "the length of a sequence may be symbolic"
