"""A chain equals PADRe's equations, and the names that it had still work."""

import pytest
import torch

from polymix.lens import Chain
from polymix.ops.padre import reference
from tests.helpers import close, tokens

N, D, E = 5, 4, 3


def chain(degree, *, per_channel=False, empty=False):
    torch.manual_seed(0)

    def many(count, *shape):
        return [torch.randn(*shape, dtype=torch.float64) for _ in range(count)]

    B = many(degree, D, E)
    if empty:
        return Chain(B=B)
    mix = (E, N, N) if per_channel else (N, N)
    A, C = many(degree, *mix), many(degree - 1, *mix)
    A[0] = None
    return Chain(B=B, b=many(degree, E), A=A, C=C, c=many(degree, E), D=many(degree - 1, E, E), gain=0.3)


@pytest.mark.parametrize("degree", [1, 2, 4])
@pytest.mark.parametrize("options", [{}, {"per_channel": True}, {"empty": True}])
def test_a_chain_is_padres_equation(degree, options):
    its, x = chain(degree, **options), tokens(2, N, D)
    close(its(x), reference.padre(x, **its.named_matrices(N)), 1e-12)
