"""Calls the C kernels of a library with random arguments and compares with plain PyTorch in float64.

Run as `python -m tests.ops.native.random_calls LIBRARY CASES`, as a program of its own: test_sanitizers.py loads the
address sanitizer before Python starts. Prints the number of cases; a wrong result raises.
"""

import ctypes
import random
import sys

import torch

from polymix.ops.gated import linear_gated
from polymix.ops.native import arrays, library
from polymix.ops.padre import padre_step
from polymix.ops.pom import PomOptions, PomState, PomWeights, linear_powers, pom_chunk
from polymix.ops.pooled import linear_pairs, linear_scaled, moments
from polymix.ops.qt import QtOptions, QtState, QtWeights, qt_chunk, qt_pool, qt_spread

ACTIVATIONS = ("identity", "gelu", "relu", "clamped_leaky_relu", "sigmoid", "hardsigmoid")


class Case:
    """Random sizes and tensors. All tokens of a case have the same dtype and a random memory layout."""

    def __init__(self, seed):
        self.random, self.generator = random.Random(seed), torch.Generator().manual_seed(seed)
        few = self.random.random() < 0.8
        self.batch = self.random.choice((0, 1, 1, 2, 3))
        self.n = self.random.randint(1, 140 if few else 700)
        if self.random.random() < 0.3:  # the ends of blocks
            self.n = self.random.choice((1, 2, 127, 128, 129, 255, 256, 257))
        self.dtype = torch.bfloat16 if self.random.random() < 0.3 else torch.float32
        self.weights = self.random.choice((self.dtype, torch.float32))
        if self.random.random() < 0.01:  # more than 64 blocks: sums of sums
            self.batch, self.n = 1, 9000

    def size(self, most=70):
        return self.random.randint(1, most)

    def floats(self, *shape):
        return torch.randn(*shape, generator=self.generator)

    def maybe(self, value):
        return value if self.random.random() < 0.6 else None

    def tokens(self, *shape):
        """Random tokens: dense, a slice of a wider array, every other token, transposed, or not aligned."""
        x = self.floats(*shape).to(self.dtype)
        layout = self.random.randrange(5)
        if layout == 1:
            return torch.cat((x, x, x), -1)[..., shape[-1] : 2 * shape[-1]]
        if layout == 2:
            return x.repeat_interleave(2, 1)[:, ::2]
        if layout == 3:
            return x.transpose(1, 2).contiguous().transpose(1, 2)
        return torch.cat((x.new_zeros(1), x.flatten()))[1:].view(shape) if layout == 4 else x

    def map(self, out, into):
        return (self.floats(out, into) / into**0.5).to(self.weights), self.maybe(self.floats(out).to(self.weights))

    def mask(self):
        return self.maybe(torch.rand(self.batch, self.n, generator=self.generator) < 0.7)


class Causal:
    """A causal kernel, which has no gradients, called like an operator; a count before the first token or None."""

    wrt = ()

    def __init__(self, name):
        self.name = name

    @torch.no_grad()
    def __call__(self, *args, impl):
        y, state = getattr(self, self.name)(*args, impl)
        return y, state[0], state.count

    def pom(self, x, *args):
        *weights, alpha, total, count, options, mask, impl = args
        state = None if count is None else PomState(total, count)
        maps = (tuple(weights[i : i + 2]) for i in (0, 2, 4))
        return pom_chunk(x, state, PomWeights(*maps, alpha), options, mask=mask, impl=impl)

    def qt(self, x, *args):
        weight, bias, last, last_bias, scale, sums, count, options, mask, impl = args
        weights = QtWeights((weight, bias), (last, last_bias), scale)
        state = None if count is None else QtState(sums, count)
        return qt_chunk(x, state, weights, options, mask=mask, impl=impl)


def causal_pom(case):
    dim, width = case.size(), case.size()
    state = case.floats(case.batch, width), case.maybe(torch.randint(1, 300, (case.batch,), generator=case.generator))
    options = PomOptions(case.random.choice(ACTIVATIONS[:4]), case.random.choice(("sigmoid", "hardsigmoid", "identity")),
                         case.random.choice(("mean", "sum")))  # fmt: skip
    maps = (*case.map(width, dim), *case.map(width, dim), *case.map(dim, width))
    alpha = case.floats(width, case.random.randint(1, 4))
    return (case.tokens(case.batch, case.n, dim), *maps, alpha, *state, options, case.mask())


def causal_qt(case):
    """Arguments of qt, with similarities far from zero: a quotient of small numbers magnifies what is rounded."""
    heads, each, order = case.random.randint(1, 4), case.size(40), case.random.randint(1, 2)
    dim = heads * each
    weight, bias = case.map(3 * dim, dim)
    weight[: 2 * dim] *= 0.3
    bias = None if bias is None else 0.3 * bias
    scale = torch.rand(3, heads, 1, 1, generator=case.generator) + torch.tensor([0.0, 0.0, 2.0])[:, None, None, None]
    sums = 0.1 * case.floats(case.batch, heads, 1 + order * each, each + 1)
    sums[:, :, 0, each] = 10.0
    state = sums, case.maybe(torch.full((case.batch,), 5))
    options = QtOptions(heads, "compact", order)
    x = case.tokens(case.batch, case.n, dim)
    return (x, weight, bias, *case.map(dim, dim), scale, *state, options, case.mask())


def arguments(case):
    """A random operator with arguments in float32 or bfloat16."""
    batch, n, dim, width, out = case.batch, case.n, case.size(), case.size(), case.size()
    heads = case.random.choice([h for h in range(1, width + 1) if width % h == 0])
    p, x = case.maybe(case.floats(heads, n)), case.tokens(batch, n, dim)
    last = case.map(out, width) if case.random.random() < 0.7 else (None, None)
    scaled_out = dim if case.random.random() < 0.5 else out
    rest = case.maybe(torch.tensor(0.7)) if scaled_out == dim else None
    per_head = case.size(9)
    number = case.random.randint(1, 5)
    order = case.random.randint(0, 2)
    qt_x = case.tokens(batch, n, number * per_head)
    sums = case.floats(batch, number, 1 + order * per_head, per_head + 1)
    sums[:, :, 0, per_head] = 3.0
    causal, axes = case.random.random() < 0.3, case.random.choice((1, 2))
    grid = [n] if axes == 1 or causal else [max(1, n // 9), case.random.randint(1, 9)]
    kernel = [case.random.randint(1, 6)] if causal else [2 * case.random.randint(0, 5) + 1 for _ in grid]
    places = torch.Size(grid).numel()
    conv_x = case.tokens(batch, places + (kernel[0] - 1 if causal else 0), dim)
    return case.random.choice([
        (linear_powers, (x, *case.map(width, dim), case.mask(), case.random.choice(ACTIVATIONS), case.random.randint(1, 4))),
        (linear_pairs, (x, *case.map(2 * width, dim), p, case.mask())),
        (linear_gated, (x, *case.map(width, dim), case.floats(batch, width), p, *last, case.random.choice(ACTIVATIONS))),
        (linear_scaled, (x, case.floats(batch, dim), *case.map(scaled_out, dim), rest)),
        (moments, (x, case.mask())),
        (qt_pool, (qt_x, *case.map(2 * number * per_head, number * per_head), case.mask(), number, order)),
        (qt_spread, (qt_x, *case.map(number * per_head, number * per_head), sums, torch.full((batch,), 2.0),
                     *case.map(out, number * per_head))),
        (padre_step, (conv_x, case.floats(dim, 1, *kernel), case.maybe(case.floats(dim)),
                      case.maybe(case.tokens(batch, places, dim)), grid, causal, 1)),
    ])  # fmt: skip


def results(operator, args, impl, dtype, wanted, seed):
    """The outputs and the gradients of the arguments at `wanted`, in float64."""
    leaves = [a.to(dtype or a.dtype) if isinstance(a, torch.Tensor) and a.is_floating_point() else a for a in args]
    leaves = [
        a.detach().requires_grad_(i in wanted) if isinstance(a, torch.Tensor) else a for i, a in enumerate(leaves)
    ]
    out = operator(*leaves, impl=impl)
    out = out if isinstance(out, tuple) else (out,)
    generator = torch.Generator().manual_seed(seed)
    cotangents = [torch.randn(y.shape, generator=generator).bfloat16().to(y.dtype) for y in out]
    grads = [None] * len(wanted)
    if any(y.requires_grad for y in out):  # order 0 of QT depends on few of its arguments
        grads = torch.autograd.grad(out, [leaves[i] for i in wanted], cotangents, allow_unused=True)
    pairs = zip(grads, wanted, strict=True)
    grads = [torch.zeros_like(leaves[i]) if grad is None else grad for grad, i in pairs]
    return [y.detach().double() for y in (*out, *grads)]


def check(seed):
    case = Case(seed)
    kinds = (
        lambda case: (Causal("pom"), causal_pom(case)),
        lambda case: (Causal("qt"), causal_qt(case)),
        *7 * [arguments],
    )
    operator, args = kinds[seed % len(kinds)](case)
    expected = [i for i in operator.wrt if args[i] is not None and case.random.random() < 0.8]
    torch.set_num_threads(case.random.choice((1, 1, 2, 3, 5, 17)))
    ours = results(operator, args, "native", None, expected, seed)
    torch.set_num_threads(1)
    exact = results(operator, args, "eager", torch.float64, expected, seed)
    bound = 2**-7 if case.dtype == torch.bfloat16 else 1e-4
    plain = None  # plain PyTorch in bfloat16: denominators near zero magnify what it rounds, too
    for place, (got, want) in enumerate(zip(ours, exact, strict=True)):
        scale = want.abs().max().clamp_min(1e-2) if want.numel() else 1.0
        limit = bound * scale
        if case.dtype == case.weights == torch.bfloat16 and ((got - want).abs() > limit).any():
            plain = plain or results(operator, args, "eager", None, expected, seed)
            limit = (plain[place] - want).abs().max()
        assert got.shape == want.shape and not ((got - want).abs() > limit).any(), (seed, operator.name)
        assert not got.isnan().any(), f"case {seed}, {operator.name}: memory was read that nothing had written"


def main(path, cases):
    loaded = ctypes.CDLL(path)
    library._library = lambda: loaded
    arrays.fast_types = lambda: {torch.bfloat16}  # tokens and weights in bfloat16 are multiplied in it
    for seed in range(int(cases)):
        check(seed)
    print(cases)


if __name__ == "__main__":
    main(*sys.argv[1:])
