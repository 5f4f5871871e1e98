"""A step of PoM in C: one token after a state, against the eager form in float64, and which calls it takes."""

import itertools

import pytest
import torch

import polymix
from polymix.ops.dispatch import recording
from polymix.ops.native import library
from polymix.ops.pom import PomState

pytestmark = pytest.mark.skipif(library.why_not() is not None, reason=f"untested: PoM's step: {library.why_not()}")
DTYPES = {torch.float32: 3e-6, torch.bfloat16: 2e-2}


def after_five(mixer, rows, dim, dtype):
    """Six tokens, and the state after five of them."""
    x = torch.randn(rows, 6, dim).to(dtype)
    return x, mixer.prefill(x[:, :5])[1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("options", list(itertools.product(
    ("gelu", "clamped_leaky_relu"), ("sigmoid", "hardsigmoid"), ("mean", "sum"), (1, 3), (True, False),
)))  # fmt: skip
@torch.inference_mode()
def test_a_step_is_the_equation(options, dtype):
    """Numbers of rows and channels that fill no tile, with every kind of option that the kernel branches on."""
    names = ("activation", "gate", "reduction", "degree", "bias")
    for rows, dim in ((1, 37), (2, 64), (3, 33), (32, 20)):
        mixer = polymix.create_mixer("pom", dim, **dict(zip(names, options, strict=True))).eval().to(dtype)
        x, state = after_five(mixer, rows, dim, dtype)
        with recording() as choices:
            y, after = mixer.step(x[:, 5], state)
        assert [choice.impl for choice in choices] == ["native"]
        eager = polymix.create_mixer("pom", dim, **dict(zip(names, options, strict=True)), impl="eager").eval()
        eager.load_state_dict(mixer.state_dict())
        want, total = eager.double().step(x[:, 5].double(), PomState(state.total.double(), state.count))
        for got, expected in ((y, want), (after.total, total.total)):
            assert (got - expected).abs().max() <= DTYPES[dtype] * expected.abs().max()
        assert torch.equal(after.count, torch.full((rows,), 6))


@torch.inference_mode()
def test_a_step_leaves_the_state_before_it_alone():
    """Generation returns to earlier states, for beams and for other continuations of one prompt."""
    mixer = polymix.create_mixer("pom", 32).eval()
    x, state = after_five(mixer, 2, 32, torch.float32)
    before = state.total.clone(), state.count.clone()
    first = mixer.step(x[:, 5], state)[0]
    assert all(map(torch.equal, before, state))
    assert torch.equal(first, mixer.step(x[:, 5], state)[0])


@torch.inference_mode()
def test_nan_in_one_sequence_stays_there():
    mixer = polymix.create_mixer("pom", 64).eval()
    x, state = after_five(mixer, 3, 64, torch.float32)
    want = mixer.step(x[:, 5], state)[0]
    x[1, 5] = torch.nan
    y = mixer.step(x[:, 5], state)[0]
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], want[[0, 2]])


def chosen(mixer, x, state, **call):
    with recording() as choices:
        mixer.prefill(x, state, **call)
    return choices[0].impl


def test_calls_that_the_kernel_cannot_take_run_eager():
    plain = polymix.create_mixer("pom", 16).eval()
    x, state = after_five(plain, 2, 16, torch.float32)
    assert chosen(plain, x[:, 5:], state) == "eager"  # gradients are recorded
    with torch.inference_mode():
        assert chosen(plain, x[:, 5:], state) == "native"
        assert chosen(plain, x[:, 4:], state) == "eager"  # two tokens
        assert chosen(plain, x[:, 5:], state, mask=torch.ones(2, 1, dtype=torch.bool)) == "eager"
        many, kept = after_five(plain, 33, 16, torch.float32)
        assert chosen(plain, many[:, 5:], kept) == "eager"  # more sequences than rows in the kernel
        for options in ({"rotary": "1d"}, {"decay": 2}, {"groups": 2}, {"selection_heads": 2}):
            mixer = polymix.create_mixer("pom", 16, **options).eval()
            x, state = after_five(mixer, 2, 16, torch.float32)
            assert chosen(mixer, x[:, 5:], state) == "eager", options
        plain.poly.weight.data = plain.poly.weight.data.t().contiguous().t()
        x, state = after_five(plain, 2, 16, torch.float32)
        assert chosen(plain, x[:, 5:], state) == "eager"  # a weight in another layout


@torch.inference_mode()
def test_native_by_name_says_what_it_takes():
    mixer = polymix.create_mixer("pom", 16, impl="native", rotary="1d").eval()
    with pytest.raises(polymix.errors.CapabilityError, match="without rotary positions and decay"):
        mixer.prefill(torch.randn(1, 5, 16))
