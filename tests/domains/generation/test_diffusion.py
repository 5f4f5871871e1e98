"""Diffusion in discrete steps: its bound against plain float64 arithmetic, schedulers against exact data, errors."""

import math
import sys

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.flow import Flow, Sampler
from polymix.domains.generation.settings import DIFFUSION_STEPS as STEPS
from polymix.domains.generation.settings import SCHEDULERS
from polymix.domains.generation.sit import SiT
from polymix.errors import MissingExtraError, OptionError

MEAN, SPREAD = 0.3, 0.2


def betas():
    return [1e-4 + (0.02 - 1e-4) * step / 999 for step in range(1000)]


def kept(step):
    """ᾱ after a step, multiplied one by one."""
    return math.prod(1 - beta for beta in betas()[: step + 1])


def posterior(x, noisy, step):
    """q(x_{s−1} | x_s, x) by Bayes' rule: the precisions of the two normal factors add up."""
    beta, before = betas()[step], kept(step - 1)
    precision = 1 / (1 - before) + (1 - beta) / beta
    mean = (math.sqrt(before) * x / (1 - before) + math.sqrt(1 - beta) * noisy / beta) / precision
    return mean, precision**-0.5


class Exact:
    """The best prediction for data whose pixels are independent and normal; a class adds 0.2 to the mean."""

    channels, training = 1, False

    def __init__(self, classes=0):
        self.classes, self.guidable, self.seen = classes, bool(classes), []

    def __call__(self, x, steps, labels=None, all_channels=False):
        self.seen.append((steps[0].item(), len(x)))
        keep = torch.tensor([kept(int(step)) for step in steps]).view(-1, 1, 1, 1)
        mean = MEAN if labels is None else MEAN + 0.2 * (labels < self.classes).float().view(-1, 1, 1, 1)
        noise = (1 - keep).sqrt() * (x - keep.sqrt() * mean) / (keep * SPREAD**2 + 1 - keep)
        return torch.cat((noise, -torch.ones_like(noise)), 1) if all_channels else noise


@pytest.mark.parametrize("step", [1, 2, 57, 500, 999])
def test_the_bound_is_the_divergence_from_the_posterior(step):
    draw = torch.Generator().manual_seed(step)
    x, noise, predicted, share = torch.randn(4, 2, 1, 3, 3, generator=draw, dtype=torch.float64)
    keep = kept(step)
    noisy = math.sqrt(keep) * x + math.sqrt(1 - keep) * noise
    bound = Diffusion().bound(x, noisy, predicted, share, torch.tensor([step, step]))
    guess = (noisy - math.sqrt(1 - keep) * predicted) / math.sqrt(keep)
    true, deviation = posterior(x, noisy, step)
    middle, _ = posterior(guess, noisy, step)
    u = (share + 1) / 2
    variance = torch.exp(u * math.log(betas()[step]) + (1 - u) * math.log(deviation**2))
    expected = kl_divergence(Normal(true, deviation), Normal(middle, variance.sqrt())) / math.log(2)
    torch.testing.assert_close(bound, expected.mean((1, 2, 3)), rtol=1e-9, atol=0)


def test_the_first_term_is_the_likelihood_of_eight_bits():
    levels = torch.arange(256, dtype=torch.float64) / 127.5 - 1
    x = levels.view(1, 1, 16, 16)
    noisy, share = math.sqrt(kept(0)) * (x + 0.01), torch.full_like(x, 0.3)
    bound = Diffusion().bound(x, noisy, torch.zeros_like(x), share, torch.tensor([0]))
    spread = math.exp(0.65 * math.log(betas()[0]) / 2 + 0.35 * math.log(posterior(x, x, 1)[1]))
    surprise = []
    for value in levels:
        p = Normal(value + 0.01, spread)
        low = torch.tensor(0.0) if value == -1 else p.cdf(value - 1 / 255)
        high = torch.tensor(1.0) if value == 1 else p.cdf(value + 1 / 255)
        surprise.append(-math.log2(float(high - low)))
    assert bound.item() == pytest.approx(sum(surprise) / 256, rel=1e-9)
    shares = [p for p in surprise if p > 0]
    assert len(shares) == 256, "every level has a probability"


def test_the_bound_teaches_the_variance_alone():
    x, times, noise = torch.rand(8, 1, 4, 4) * 2 - 1, torch.arange(8) / 8, torch.randn(8, 1, 4, 4)
    model = torch.nn.Conv2d(1, 2, 1)

    def called(noisy, steps, labels, all_channels):
        assert torch.equal(steps, torch.arange(8.0) * 125) and all_channels
        return model(noisy)

    Diffusion().loss(called, x, times=times, noise=noise).backward()
    learned = model.weight.grad.clone()
    model.zero_grad()
    Diffusion("fixed").loss(lambda noisy, steps, labels: model(noisy)[:, :1], x, times=times, noise=noise).backward()
    torch.testing.assert_close(learned[0], model.weight.grad[0])
    assert learned[1].abs().max() > 0 and model.weight.grad[1].abs().max() == 0


@pytest.mark.parametrize("variance", ["learned", "fixed"])
@pytest.mark.parametrize(("method", "steps"), [("ddpm", 250), ("ddim", 50), ("dpm++", 25)])
def test_every_scheduler_draws_the_data(method, steps, variance):
    model = Exact()
    images = Sampler(method=method, steps=steps).sample(model, (16, 16), seeds=range(8), flow=Diffusion(variance))
    assert abs(images.mean() - MEAN) < 0.02 and abs(images.std() - SPREAD) < 0.03, (images.mean(), images.std())
    assert len(model.seen) == steps and model.seen[0][0] == STEPS - 1, "the first step is that of pure noise"


@pytest.mark.parametrize("method", SCHEDULERS)
def test_a_seed_gives_the_same_image_in_any_batch(method):
    sampler = Sampler(method=method, steps=10)
    together = sampler.sample(Exact(), (4, 4), seeds=range(3), flow=Diffusion())
    apart = sampler.sample(Exact(), (4, 4), seeds=range(3), flow=Diffusion(), batch_size=1)
    torch.testing.assert_close(together, apart)


@pytest.mark.parametrize("variance", ["learned", "fixed"])
def test_guidance_moves_the_noise_and_leaves_the_variance(variance):
    plain, guided = (
        Sampler(method="ddpm", steps=50, guidance=omega).sample(
            Exact(classes=2), (16, 16), seeds=range(4), labels=[0] * 4, flow=Diffusion(variance)
        )
        for omega in (1, 2)
    )
    assert abs(plain.mean() - MEAN - 0.2) < 0.02 and abs(guided.mean() - MEAN - 0.4) < 0.03
    model = Exact(classes=2)
    Sampler(method="ddim", steps=10, guidance=2, guidance_interval=(0.5, 1.0)).sample(
        model, (2, 2), seeds=[0], labels=[1], flow=Diffusion(variance)
    )
    assert [count for _, count in model.seen] == [1] * 5 + [2] * 5, "guided from the middle on"


def test_a_model_shows_its_second_half_when_asked():
    model = SiT(image_size=4, patch=2, channels=1, classes=0, dim=8, depth=1, heads=2, double_output=True)
    torch.nn.init.normal_(model.head.weight)
    x, t = torch.randn(2, 1, 4, 4), torch.tensor([3.0, 999.0])
    whole = model(x, t, all_channels=True)
    assert whole.shape == (2, 2, 4, 4) and torch.equal(whole[:, :1], model(x, t))
    with pytest.raises(OptionError, match="double_output=True"):
        SiT(image_size=4, channels=1, classes=0, dim=8, depth=1, heads=2)(x, t, all_channels=True)


@pytest.mark.parametrize(("make", "named"), [
    (lambda: Diffusion("none"), "variance"), (lambda: Sampler(method="ddpm", steps=1001), "steps"),
    (lambda: Sampler(method="ddim", steps=30), "steps"),
    (lambda: Sampler(method="heun").sample(Exact(), (2, 2), seeds=[0], flow=Diffusion()), "method"),
    (lambda: Sampler(method="ddpm").sample(Exact(), (2, 2), seeds=[0], flow=Flow()), "method"),
])  # fmt: skip
def test_options_that_cannot_be(make, named):
    with pytest.raises(OptionError) as told:
        make()
    assert told.value.argument == named


def test_without_diffusers_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "diffusers", None)
    with pytest.raises(MissingExtraError, match=r"\.\[diffusion\]"):
        Sampler(method="ddim").sample(Exact(), (2, 2), seeds=[0], flow=Diffusion())
