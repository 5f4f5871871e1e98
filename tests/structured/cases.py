"""The structures that the tests here go through, and what a map is held against: its dense matrix."""

import torch

from polymix.structured import Site, token_map
from tests.helpers import close, jitter, plus, tokens

TOL = 1e-12
F64 = {"dtype": torch.float64}
DIM, N = 24, 12
SPECS = [
    "identity", "dense", "diagonal", "block_diagonal:blocks=2", "low_rank:rank=3", "rank_one", "banded:lower=2",
    "sparse:density=0.3:seed=4", "depthwise:kernel=3", "depthwise:kernel=3:dilation=2", "circulant",
    "circulant:filter=implicit", "circulant:length=5", "toeplitz", "toeplitz:filter=implicit", "toeplitz:length=5",
    "monarch", "monarch:blocks=6", "mean", "diagonal+low_rank:rank=2", "banded:lower=1@monarch",
    "toeplitz+mean@depthwise:kernel=3", "low_rank:rank=2^T", "toeplitz^T", "circulant^T+identity",
]  # fmt: skip
TOKEN_ONLY = ["banded:lower=2:upper=1", "circulant:shared=true", "toeplitz:shared=true"]
CAUSAL = {
    "identity": True,
    "dense": False,
    "diagonal": False,
    "block_diagonal:blocks=2": False,
    "low_rank:rank=3": False,
    "rank_one": False,
    "banded:lower=2": False,
    "sparse:density=0.3": False,
    "depthwise:kernel=4": True,
    "depthwise:kernel=3:dilation=2": True,
    "toeplitz": True,
    "toeplitz:length=5": True,
    "toeplitz:length=1": True,
    "toeplitz:filter=implicit": False,
    "toeplitz:shared=true": True,
    "mean": True,
    "mean+depthwise:kernel=2": True,
    "mean@toeplitz:length=3": True,
    "diagonal+mean": False,
}  # spec: whether it can go on from a state of fixed size


def site(side="token", groups=1, causal=False, n=N, dim=DIM):
    size = n if side == "token" else dim // groups
    return Site(side, dim, size, size, groups, causal)


def conv(dim, kernel, causal=False, prefix=0, bias=False, **options):
    spec = "depthwise" + "".join(f":{key}={value}" for key, value in options.items())
    where = Site("token", dim, causal=causal, kernel=kernel)
    return jitter(token_map(spec, where, prefix=prefix, bias=bias, **F64))


def act(matrix, x):
    return torch.einsum("mn,bnd->bmd" if matrix.ndim == 2 else "dmn,bnd->bmd", matrix, x)


def of(side, matrix, x, bias=None):
    return plus(act(matrix, x) if side == "token" else x @ matrix, bias)


def agree(module, apply, expected, *inputs):
    """The two functions of `inputs` and of the module's parameters have the same values and the same gradients."""
    inputs = [tensor.clone().requires_grad_() for tensor in inputs]
    leaves = [*inputs, *module.parameters()]
    y, z = apply(*inputs), expected(*inputs)
    assert y.shape == z.shape
    close(y, z, TOL)
    cotangent = tokens(*y.shape, seed=9)
    ours, theirs = (torch.autograd.grad(out, leaves, cotangent, allow_unused=True) for out in (y, z))
    for mine, dense in zip(ours, theirs, strict=True):
        assert (mine is None) == (dense is None), "one of the two ignores a parameter"
        if mine is not None:
            close(mine, dense, TOL)
