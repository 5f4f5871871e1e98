"""What every test of an error says of its message, and the arguments of the calls that are refused."""

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from polymix import errors
from tests.helpers import tokens

ANY = errors.PolymixError


def says(call, kind, argument, *words):
    """`call` raises `kind` about `argument`, and its message holds all of its parts and these words."""
    with pytest.raises(kind) as info:
        call()
    error, message = info.value, str(info.value)
    assert isinstance(error, errors.PolymixError), f"{type(error)} is no error of this package"
    assert error.argument == argument, f"the error is about {error.argument}, not {argument}"
    assert str(error.got) and error.allowed, f"what came, or what is allowed, is missing from: {message}"
    for part in (f"`{error.argument}`", str(error.got), error.allowed, error.cure, *words):
        assert part in message, f"{part!r} is missing from: {message}"
    return error


class NoCompute(TorchDispatchMode):
    """Any operation on tensors is an error, but for another view of the same numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func is not torch.ops.aten.promote_types.default:
            raise AssertionError(f"{func} ran before the check")
        return func(*args, **(kwargs or {}))


def x(*shape, dtype=torch.float32):
    return tokens(*(shape or (2, 12, 8)), dtype=dtype)


X = x()
PAD = torch.ones(2, 12, dtype=torch.bool)
SEEN = torch.ones(2, 12, 12, dtype=torch.bool)
IDS = torch.zeros(2, 12, dtype=torch.int64)
CAUSAL, GRID, PREFIX = {"causal": True}, {"grid": (3, 4)}, {"num_prefix_tokens": 3}
FULL, FLAT, MEAN = {"weight": "full", "grid": (3, 4)}, {"rotary": "2d"}, {"positions": "mean"}
