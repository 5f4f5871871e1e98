"""Flow matching: samplers against data whose exact velocity is known, guidance, seeds and errors."""

import sys

import pytest
import torch

from polymix.domains.generation.flow import Flow, Sampler
from polymix.domains.generation.settings import PATHS, TARGETS
from polymix.domains.generation.sit import SiT
from polymix.errors import MissingExtraError, OptionError, ShapeError

MEAN, SPREAD = 2.0, 0.5
FLOWS = [Flow(path, target) for path in PATHS for target in TARGETS]


class Exact:
    """The best prediction for data whose pixels are independent and normal; a class adds 1 to the mean."""

    channels, classes, guidable, training = 1, 0, False, False

    def __init__(self, flow, classes=0, channels=1):
        self.flow, self.classes, self.guidable, self.channels = flow, classes, bool(classes), channels

    def __call__(self, x, t, labels=None):
        alpha, sigma, growth, decay = (c.view(-1, 1, 1, 1) for c in self.flow.coefficients(t))
        mean = MEAN if labels is None else MEAN + (labels < self.classes).float().view(-1, 1, 1, 1)
        score = -(x - alpha * mean) / (alpha**2 * SPREAD**2 + sigma**2)
        noise = -sigma * score
        data = mean + alpha * SPREAD**2 * -score
        return {"score": score, "noise": noise, "velocity": growth * data + decay * noise}[self.flow.target]


@pytest.mark.parametrize("path", PATHS)
def test_the_derivatives_are_those_of_the_path(path):
    t = torch.linspace(0.05, 0.95, 19, dtype=torch.float64)
    flow, step = Flow(path), 1e-5
    later, before, here = flow.coefficients(t + step), flow.coefficients(t - step), flow.coefficients(t)
    for value in (0, 1):
        torch.testing.assert_close((later[value] - before[value]) / (2 * step), here[2 + value], rtol=1e-6, atol=1e-8)
    ends = flow.coefficients(torch.tensor([0.0, 1.0]))
    assert torch.allclose(ends[0], torch.tensor([0.0, 1.0]), atol=0.01) and torch.allclose(
        ends[1], torch.tensor([1.0, 0.0]), atol=1e-3
    ), "t = 1 is data"


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_velocity_and_score_follow_from_every_target(flow):
    x, t = torch.randn(9, 1, 2, 2, generator=torch.Generator().manual_seed(0)), torch.linspace(0.1, 0.9, 9)
    out = Exact(flow)(x, t)
    for name, convert in (("velocity", flow.velocity), ("score", flow.score)):
        torch.testing.assert_close(convert(out, x, t), Exact(Flow(flow.path, name))(x, t), rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_every_sampler_draws_the_data(flow):
    for method, steps in (("euler", 100), ("heun", 50), ("euler_maruyama", 100)):
        images = Sampler(method=method, steps=steps).sample(Exact(flow), (16, 16), seeds=range(16), flow=flow)
        assert images.shape == (16, 1, 16, 16)
        assert abs(images.mean() - MEAN) < 0.05 and abs(images.std() - SPREAD) < 0.07, (method, images.std())


def draw(**options):
    return Sampler(**options).sample(Exact(Flow()), (4, 4), seeds=range(2))


def test_heun_is_of_second_order():
    exact = draw(steps=400)
    errors = {name: [(draw(method=name, steps=n) - exact).abs().max() for n in (20, 40)] for name in ("euler", "heun")}
    assert 1.6 < errors["euler"][0] / errors["euler"][1] < 2.4 and errors["heun"][0] / errors["heun"][1] > 3.2


def test_dopri5_is_within_its_tolerance():
    pytest.importorskip("torchdiffeq", reason="untested: dopri5, for which torchdiffeq is needed (the flow extra)")
    assert (draw(method="dopri5") - draw(steps=400)).abs().max() < 0.01


@pytest.mark.parametrize("flow", FLOWS, ids=str)
def test_the_exact_model_has_the_least_loss(flow):
    data = MEAN + SPREAD * torch.randn(512, 1, 4, 4, generator=torch.Generator().manual_seed(1))
    exact = Exact(flow)

    def loss(model):
        return flow.loss(model, data, draw=torch.Generator().manual_seed(0))

    assert loss(exact) < min(loss(lambda x, t, labels, c=c: c * exact(x, t)) for c in (0.8, 1.2))


def test_guidance_moves_the_channels_and_times_it_is_asked_to():
    model = Exact(Flow(), classes=1, channels=4)

    def mean(**options):
        return Sampler(steps=20, **options).sample(model, (8, 8), seeds=range(8), labels=[0] * 8).mean((0, 2, 3))

    plain, guided, three = mean(), mean(guidance=3.0), mean(guidance=3.0, guidance_channels=3)
    assert torch.allclose(plain, torch.full((4,), MEAN + 1), atol=0.1)
    assert torch.allclose(guided, torch.full((4,), MEAN + 3), atol=0.1), "none + 3 (class − none)"
    assert torch.equal(three[:3], guided[:3]) and torch.allclose(three[3], plain[3])
    part = mean(guidance=3.0, guidance_interval=(0.3, 0.6))
    assert (plain + 0.1 < part).all() and (part < guided - 0.1).all()


@pytest.mark.parametrize("method", ["heun", "euler_maruyama", "dopri5"])
def test_a_seed_gives_the_same_image_in_any_batch(method):
    if method == "dopri5":
        pytest.importorskip("torchdiffeq", reason="untested: dopri5, for which torchdiffeq is needed (the flow extra)")
    torch.manual_seed(0)
    model = SiT(image_size=4, patch=2, channels=1, classes=3, dim=8, depth=1, heads=2, gate_start=1.0).eval()
    torch.nn.init.normal_(model.head.weight)
    sampler = Sampler(method=method, guidance=2.0, **({} if method == "dopri5" else {"steps": 4}))
    labels, seeds = [0, 1, 2, 0, 1], [5, 6, 7, 8, 6]
    many = sampler.sample(model, (4, 4), seeds=seeds, labels=labels)
    few = sampler.sample(model, (4, 4), seeds=seeds[2:4], labels=labels[2:4], batch_size=1)
    torch.testing.assert_close(few, many[2:4])
    torch.testing.assert_close(many[1], many[4])
    assert not torch.allclose(many[0], many[3]), "another seed, another image"


def test_errors_name_the_argument(monkeypatch):
    free, classed = Exact(Flow()), Exact(Flow(), classes=2)
    bare = Exact(Flow(), classes=2)
    bare.guidable = False
    busy = Exact(Flow())
    busy.training = True
    one = {"size": (2, 2), "seeds": [0]}
    wrong = [
        (OptionError, "steps", lambda: Sampler(steps=0)),
        (OptionError, "steps", lambda: Sampler(method="dopri5", steps=9)),
        (OptionError, "diffusion", lambda: Sampler(diffusion=2.0)),
        (OptionError, "rtol", lambda: Sampler(rtol=0.1)),
        (OptionError, "guidance_channels", lambda: Sampler(guidance_channels=3)),
        (OptionError, "guidance_interval", lambda: Sampler(guidance=2.0, guidance_interval=(0.5, 0.2))),
        (OptionError, "path", lambda: Flow("cubic")),
        (OptionError, "target", lambda: Flow(target="data")),
        (OptionError, "labels", lambda: Sampler().sample(free, labels=[0], **one)),
        (OptionError, "labels", lambda: Sampler().sample(classed, labels=[2], **one)),
        (OptionError, "labels", lambda: Sampler().sample(bare, **one)),
        (OptionError, "guidance", lambda: Sampler(guidance=2.0).sample(bare, labels=[0], **one)),
        (OptionError, "guidance", lambda: Sampler(guidance=2.0).sample(classed, **one)),
        (OptionError, "guidance_channels",
         lambda: Sampler(guidance=2.0, guidance_channels=3).sample(classed, labels=[0], **one)),
        (OptionError, "model", lambda: Sampler().sample(busy, **one)),
        (OptionError, "seeds", lambda: Sampler().sample(free, (2, 2), seeds=[])),
        (ShapeError, "labels", lambda: Sampler().sample(classed, labels=[0, 1], **one)),
    ]  # fmt: skip
    for kind, argument, call in wrong:
        with pytest.raises(kind) as error:
            call()
        assert error.value.argument == argument
    monkeypatch.setitem(sys.modules, "torchdiffeq", None)
    with pytest.raises(MissingExtraError, match=r"\.\[flow\]"):
        Sampler(method="dopri5").sample(free, **one)
