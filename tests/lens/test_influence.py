"""Influence maps of a mixer inside a model: against the model's own derivatives, and drawn on a real digit."""

from functools import partial

import pytest
import torch
from torch import nn

import polymix
from polymix import errors, lens
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.models import VisionTransformer
from polymix.train.data.images import load_digits
from polymix.train.in_memory import train_in_memory


def host(name, classes=3, channels=1, class_token=False, **options):
    torch.manual_seed(0)
    config = polymix.mixers.config_class(name)(**options)
    model = VisionTransformer(
        config, image_size=(8, 12), patch_size=2, dim=8, depth=2, classes=classes, channels=channels, class_token=class_token
    )  # fmt: skip
    if class_token:  # it starts at zero, and so do products with it
        nn.init.normal_(model.class_token)
    return model


def picture(seed=0):
    return torch.randn(1, 1, 8, 12, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("class_token", [False, True])
@pytest.mark.parametrize("name", ["padre", "pom", "qt", "poly_sa", "poly_nl", "softmax"])
def test_maps_of_every_mixer(name, class_token):
    model = host(name, class_token=class_token)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    result = lens.influence(model, picture())
    assert (result.mixer, result.module, result.grid) == (name, "blocks.1.mixer", (4, 6))
    assert result.token == int(class_token) + 2 * 6 + 3, "the middle"
    assert set(result.maps) == {"jacobian", "gradient"} | ({"attention"} if name == "softmax" else set())
    for kind, values in result.maps.items():
        assert values.shape == (4, 6)
        assert values.isfinite().all() and values.any()
        assert result.prefix[kind].shape == (int(class_token),)
    assert result.maps["jacobian"].min() >= 0
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())
    assert model.training
    assert all(p.grad is None for p in model.parameters())
    assert "half of it on" in str(result)


def test_the_maps_are_the_derivatives():
    model = host("softmax", heads=2).double().eval()
    images = picture().double()
    seen = {}
    block = model.blocks[0]
    block.mixer.register_forward_pre_hook(lambda module, given: seen.update(x=given[0]))
    answer = model(images)[0]
    (slope,) = torch.autograd.grad(answer[1], seen["x"])
    result = lens.influence(model, images, module="blocks.0.mixer", token=(1, 2), target=1)
    assert torch.allclose(result.maps["gradient"].flatten(), (slope * seen["x"])[0].sum(-1).detach())
    table = torch.autograd.functional.jacobian(lambda x: block.mixer(x)[0, 8], seen["x"].detach())[:, 0]
    assert torch.allclose(result.maps["jacobian"].flatten(), table.square().sum((0, 2)).sqrt())
    letters = block.mixer.matrices(24)
    x = seen["x"][0].detach()
    weights = torch.zeros(24, dtype=torch.float64)
    q, k = x @ letters["W_q"] + letters["b_q"], x @ letters["W_k"] + letters["b_k"]
    for head in (slice(0, 4), slice(4, 8)):
        weights += torch.softmax(q[8, head] @ k[:, head].T / 2, 0) / 2
    assert torch.allclose(result.maps["attention"].flatten(), weights)
    assert result.maps["attention"].sum().item() == pytest.approx(1)


class Sequence(nn.Module):
    """A model of another kind: a mixer asked causally, by name, with a mask, in a residual stream."""

    def __init__(self, name):
        super().__init__()
        self.first, self.mixer, self.last = nn.Linear(3, 8), polymix.create_mixer(name, 8), nn.Linear(8, 5)

    def forward(self, x, mask=None):
        x = self.first(x)
        return {"logits": None} if x is None else self.last(x + self.mixer(x=x, causal=True, mask=mask)).mean(1)


@pytest.mark.parametrize("name", ["softmax", "pom"])
def test_a_causal_model_of_ones_own(name):
    mask = torch.ones(1, 10, dtype=torch.bool)
    mask[:, :2] = False
    result = lens.influence(Sequence(name), torch.randn(1, 10, 3), token=5, mask=mask)
    assert result.grid == (10,)
    for kind in result.maps.keys() - {"gradient"}:
        assert result.maps[kind].nonzero().flatten().tolist() == [2, 3, 4, 5], kind
    if name == "softmax":
        assert result.maps["attention"].sum().item() == pytest.approx(1)


def test_a_mixer_alone():
    result = lens.influence(
        polymix.create_mixer("padre", 4, grid=(3, 4), kernel_size=3), torch.randn(1, 12, 4), token=(0, 0)
    )
    assert (result.module, result.grid) == ("", (3, 4))
    assert result.maps["jacobian"].nonzero().tolist() == [[0, 0], [0, 1], [1, 0], [1, 1]]


def test_errors():
    model = host("pom")
    cases = [
        ({"module": "blocks.7.mixer"}, errors.UnknownNameError, "blocks.0.mixer"), ({"token": (9, 9)}, errors.OptionError, "token"),
        ({"token": 99}, errors.OptionError, "token"), ({"target": 3}, errors.OptionError, "target"), ({"token": (1,)}, errors.OptionError, "token"),
    ]  # fmt: skip
    for options, error, named in cases:
        with pytest.raises(error, match=named):
            lens.influence(model, picture(), **options)
    with pytest.raises(errors.OptionError, match="contains a mixer"):
        lens.influence(nn.Linear(3, 3), torch.randn(1, 3))
    with pytest.raises(errors.ShapeError, match="one input"):
        lens.influence(model, torch.randn(2, 1, 8, 12))
    with pytest.raises(errors.ShapeError, match="x"):
        lens.influence(model, "digit.png")
    with pytest.raises(errors.OptionError, match="model"):
        lens.influence(torch.tanh, picture())
    with pytest.raises(errors.OptionError, match="not finite"):
        lens.influence(model, torch.full((1, 1, 8, 12), torch.nan))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.inf)
    with pytest.raises(errors.OptionError, match="not finite"):
        lens.influence(model, picture())


@pytest.mark.draws
def test_a_trained_model_on_a_real_digit_beside_attention(tmp_path):
    """After a few seconds of training, the picture of both; and the answer's map adds to what the mixer was given."""
    data = load_digits(8)
    sizes = {"image_size": 8, "patch_size": 2, "dim": 16, "depth": 1, "classes": 10, "channels": 1}
    models = []
    for name in ("padre", "softmax"):
        config = polymix.mixers.config_class(name)()
        build = partial(VisionTransformer, config, **sizes)
        models.append(train_in_memory(ClassifyTask(ClassifyRecipe(image_size=8, epochs=1)), data, build).model)
    image = data.normalise(data.test.images[:1])
    result = lens.influence(models[0], image, beside=models[1])
    assert (result.beside.mixer, result.beside.token, result.beside.target) == ("softmax", result.token, result.target)
    assert set(result.beside.maps) - set(result.maps) == {"attention"}
    assert result.plot(tmp_path / "influence.png").stat().st_size > 20_000
    assert torch.equal(result.image.float(), image[0])
