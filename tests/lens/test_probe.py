"""What the lens does to the module that it is shown (nothing), and what it says when it cannot look."""

import pytest
import torch
from torch import nn

import polymix
from polymix import errors, lens
from tests.helpers import tokens

LOOKS = {
    "degree": lens.degree, "interactions": lambda module, **kw: lens.interactions(module, 2, **kw), "receptive_field": lens.receptive_field,
    "equivariance": lens.equivariance, "contextual_mapping": lens.contextual_mapping,
}  # fmt: skip


class Own(nn.Module):
    """A user's module: dropout, a batch norm, half precision in one buffer, an output in a tuple."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm, self.drop = nn.Linear(3, 3), nn.BatchNorm1d(4), nn.Dropout(0.5)
        self.register_buffer("small", torch.ones(3, dtype=torch.float16))
        self.register_buffer("turn", torch.ones(3, dtype=torch.complex64))

    def forward(self, x):
        y = self.drop(self.norm(self.linear(x))) * self.small * (x * self.turn).real
        return y, x


@pytest.mark.parametrize("look", list(LOOKS))
@pytest.mark.parametrize("training", [True, False])
def test_the_module_stays_as_it_is(look, training):
    module = Own().train(training)
    before = {key: value.clone() for key, value in module.state_dict().items()}
    state = torch.get_rng_state()
    LOOKS[look](module, shape=(1, 4, 3))
    assert torch.equal(torch.get_rng_state(), state)
    assert module.training == training
    for key, value in module.state_dict().items():
        assert value.dtype == before[key].dtype
        assert torch.equal(value, before[key])
    assert all(p.requires_grad and p.grad is None for p in module.parameters())


def test_an_own_module_in_evaluation():
    assert lens.degree(Own(), shape=(1, 4, 3)).degree == 2
    assert lens.degree(Own(), torch.randn(2, 4, 3)).degree == 2, "a batch of several, in single precision"


def test_a_module_in_bfloat16_and_under_autocast():
    mixer = polymix.create_mixer("poly_nl", 4, dtype=torch.bfloat16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert lens.degree(mixer).degree == 3


def test_a_function_that_mixes_its_batch_is_asked_point_by_point():
    result = lens.degree(lambda x: x * x.sum(0), shape=(2, 3, 2))
    assert (result.degree, result.homogeneous) == (2, True)
    assert lens.degree(lambda x: x * x.mean(), shape=(1, 3, 2)).degree == 2


def test_the_same_seed_gives_the_same_result():
    mixer = polymix.create_mixer("pom", 4)
    assert lens.degree(mixer, seed=3) == lens.degree(mixer, seed=3)


@pytest.mark.parametrize("look", list(LOOKS))
@pytest.mark.parametrize(("module", "options", "error", "named"), [
    (nn.Linear(3, 3), {}, errors.ShapeError, "shape"), (nn.Linear(3, 3), {"shape": (1, 4, 5)}, errors.ShapeError, "shape"),
    (nn.Linear(3, 3), {"shape": (1, 0, 3)}, errors.ShapeError, "sizes of at least 1"), (nn.Linear(3, 3), {"shape": 3}, errors.ShapeError, "tuple"),
    (nn.Linear(3, 3), {"x": [1.0]}, errors.ShapeError, "floating-point"), (nn.Linear(3, 3), {"x": torch.ones(1, 3).long()}, errors.ShapeError, "x"),
    (nn.Linear(3, 3), {"x": torch.ones(1, 3), "shape": (1, 3)}, errors.OptionError, "shape"), ("padre", {}, errors.OptionError, "module"),
    (lambda x: {"y": x}, {"shape": (1, 3)}, errors.OptionError, "tensor"), (nn.Linear(3, 3), {"shape": (1, 3), "seed": -1}, errors.OptionError, "seed"),
    (nn.Linear(3, 3), {"shape": (1, 3), "casual": True}, errors.ShapeError, "casual"),
])  # fmt: skip
def test_errors_name_the_argument(look, module, options, error, named):
    with pytest.raises(error, match=named):
        LOOKS[look](module, **options)


def test_more_errors():
    linear = nn.Linear(3, 3)
    for options in ({"max_degree": -1}, {"max_degree": 65}, {"max_rational": 33}, {"lines": 0}):
        with pytest.raises(errors.OptionError, match=next(iter(options))):
            lens.degree(linear, shape=(1, 3), **options)
    with pytest.raises(errors.OptionError, match="order"):
        lens.interactions(linear, 5, shape=(1, 3))
    with pytest.raises(errors.ShapeError, match="smaller shape"):
        lens.interactions(linear, 4, shape=(1, 99, 3))
    with pytest.raises(errors.ShapeError, match="tokens with their channels"):
        lens.receptive_field(nn.Identity(), shape=(1, 3, 4, 4))
    with pytest.raises(errors.OptionError, match="token"):
        lens.interactions(linear, 1, shape=(1, 3), output=(7, 0))
    with pytest.raises(errors.ShapeError, match="same number of tokens"):
        lens.equivariance(lambda x: x.sum(1), shape=(1, 3, 2))
    stuck = nn.Linear(3, 3)
    stuck.kept = stuck.weight * 2
    with pytest.raises(errors.OptionError, match="deepcopy"):
        lens.degree(stuck, shape=(1, 3))
    with pytest.raises(errors.CapabilityError, match="causal"):
        lens.degree(polymix.create_mixer("poly_nl", 4), causal=True)


def test_a_given_input_is_the_first_looked_at():
    """sqrt exists at ones, not at random inputs."""
    x = torch.full((1, 4), 9.0)
    result = lens.receptive_field(lambda x: x.sqrt(), x=x, draws=1)
    assert torch.allclose(result.magnitude, torch.eye(1, dtype=torch.float64) * (4 / 36) ** 0.5)
    assert lens.degree(lambda x: x + 0, tokens(1, 4)).degree == 1
