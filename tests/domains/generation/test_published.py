"""SiT and DiT against arrays of their authors' code: model, losses, samplers, fresh weights, and the preset's numbers."""

import math

import pytest
import torch
from torch import nn

from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.flow import Flow, Sampler
from polymix.domains.generation.recipe import GenerationRecipe
from polymix.domains.generation.sit import SiT, from_published
from polymix.domains.generation.task import GenerationTask
from polymix.errors import OptionError
from polymix.mixers import PomConfig
from polymix.train.data.sampling import seed_all
from tests.helpers import close, published_host

SIT, SIT_OPTIONS = published_host("sit")
DIT, DIT_OPTIONS = published_host("dit")


def loaded(parts, options):
    model = SiT(**options)
    model.load_state_dict(from_published(parts["w"]))
    return model.eval()


@pytest.fixture(scope="module")
def sit():
    return loaded(SIT, SIT_OPTIONS)


@pytest.fixture(scope="module")
def dit():
    return loaded(DIT, DIT_OPTIONS)


def labels(parts):
    return parts["in"]["labels"]


def test_published_weights_give_the_published_velocity():
    """Positions with rows before columns, as we once had them, give another image."""
    model = loaded(SIT, SIT_OPTIONS)
    velocity = model(SIT["in"]["images"], SIT["in"]["times"], labels(SIT))
    close(velocity, SIT["out"]["velocity"], 1e-5)
    velocity.square().mean().backward()
    named = dict(model.named_parameters())
    for name, gradient in from_published(SIT["grad"]).items():
        close(named[name].grad, gradient, 1e-4)
    swapped = model.position.view(4, 4, -1).transpose(0, 1).reshape(16, -1)
    model.position.copy_(swapped)
    assert (model(SIT["in"]["images"], SIT["in"]["times"], labels(SIT)) - velocity).abs().max() > 0.1


def test_guidance_is_published_on_three_channels(sit):
    sampler = Sampler(guidance=3.0, guidance_channels=3)
    with torch.no_grad():
        guided = sampler._predict(sit, SIT["in"]["images"][:2], 0.5, torch.tensor([1, 2]))
    close(guided, SIT["out"]["guided"], 1e-5)


@pytest.mark.parametrize("path", ["linear", "gvp", "vp"])
@pytest.mark.parametrize("target", ["velocity", "noise", "score"])
def test_losses_are_published(sit, path, target):
    inputs = SIT["in"]
    with torch.no_grad():
        loss = Flow(path, target).loss(
            sit, inputs["images"], labels(SIT), times=inputs["shares"], noise=inputs["noise"]
        )
    close(loss, SIT["out"][f"loss_{path}_{target}"], 1e-5)


def test_the_path_vp_is_trained_almost_to_the_data(sit):
    """To t = 1 - 1e-5, though images are drawn to 1 - 1e-3."""
    inputs, flow = SIT["in"], Flow("vp")
    with torch.no_grad():
        loss = flow.loss(sit, inputs["images"], labels(SIT), times=inputs["late_shares"], noise=inputs["noise"])
    close(loss, SIT["out"]["loss_late"], 3e-3)  # their σ is rounded there
    assert flow.level(torch.ones(())).item() == pytest.approx(1 - 1e-5) and flow.times == (0.0, 1 - 1e-3)


@pytest.mark.parametrize("path", ["linear", "vp"])
def test_steps_of_the_sde_are_counted_as_published(sit, path, monkeypatch):
    """Six steps with the last one: five that add noise, and six evaluations of the model."""
    noise, calls = SIT["in"][f"sde_{path}"], []
    draws = iter(noise.flatten(0, 1))
    sit.register_forward_hook(lambda *args: calls.append(1))
    monkeypatch.setattr(torch, "randn", lambda shape, generator: next(draws))
    sampler = Sampler(method="euler_maruyama", steps=6)
    drawn = sampler.sample(sit, (8, 8), seeds=[0, 1], labels=labels(SIT)[:2].tolist(), flow=Flow(path))
    close(drawn, SIT["out"][f"sde_{path}"], 1e-4)
    assert len(calls) == 6 and next(draws, None) is None
    with pytest.raises(OptionError, match="at least 2"):
        Sampler(method="euler_maruyama", steps=1)


def test_fresh_weights_are_published():
    task = GenerationTask(
        GenerationRecipe(host_init="published", mixer="softmax", dim=96, depth=1, heads=2, gate_start=1)
    )
    data = type("Data", (), {"shape": (1, 8, 8), "classes": range(10)})
    seed_all(0)
    model = task.build(data)
    block, zero = model.blocks[0], (model.blocks[0].modulation[1], model.modulation[1], model.head)
    for layer in (block.mixer.qkv.qkv, block.mixer.proj, block.mlp[0], block.mlp[2]):
        expected = math.sqrt(2 / (layer.in_features + layer.out_features))
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.05) and not layer.bias.any()
    for layer in (model.time[0], model.time[2]):
        assert layer.weight.std().item() == pytest.approx(0.02, rel=0.05) and not layer.bias.any()
    assert not any(layer.weight.any() for layer in zero)
    assert block.modulation[1].bias.view(6, -1).mean(1).tolist() == [0, 0, 1, 0, 0, 1], "the gates"
    embed = math.sqrt(2 / (model.embed.weight[0].numel() + 96))
    assert model.embed.weight.std().item() == pytest.approx(embed, rel=0.2)


def test_published_weights_leave_mixers_alone():
    seed_all(0)
    own = SiT(PomConfig(), image_size=4, channels=1, classes=0, dim=16, depth=1, heads=2)
    mixer = {name: value.clone() for name, value in own.blocks[0].mixer.state_dict().items()}
    own.start_as_published()
    assert all(torch.equal(value, mixer[name]) for name, value in own.blocks[0].mixer.state_dict().items())


def test_dit_s_loss_is_published(dit):
    """With its approximate normal distribution at the first step; the exact one is near."""
    inputs = DIT["in"]
    times = (inputs["steps"] + 0.5) / 1000

    def loss(normal):
        with torch.no_grad():
            return Diffusion(normal=normal).loss(dit, inputs["images"], labels(DIT), times=times, noise=inputs["noise"])

    close(loss("tanh"), DIT["out"]["loss"], 1e-5)
    assert 1e-7 < abs(loss("exact") - DIT["out"]["loss"]) < 1e-2
    for options in ({"variance": "fixed"}, {"process": "flow"}):
        with pytest.raises(OptionError, match="normal"):
            GenerationRecipe(**{"process": "diffusion", "normal": "tanh", **options})


def drawn(dit, method, steps, spacing="trailing"):
    def predict(x, step):
        return dit(x, torch.full((2,), float(step)), labels(DIT)[:2], all_channels=True)

    with torch.no_grad():
        return Diffusion().run(method, steps, predict, DIT["in"]["start"], [torch.Generator()] * 2, spacing)


def test_ddim_takes_the_published_steps_if_asked(dit):
    close(drawn(dit, "ddim", 10, "leading"), DIT["out"]["ddim"], 1e-4)
    assert (drawn(dit, "ddim", 10) - DIT["out"]["ddim"]).abs().max() > 0.1
    recipe = GenerationRecipe(process="diffusion", sampler="ddim", ddim_spacing="leading")
    assert recipe.make_sampler().spacing == "leading"
    with pytest.raises(OptionError, match="ddim_spacing"):
        GenerationRecipe(process="diffusion", ddim_spacing="leading")


def test_ddpm_with_learned_variances_is_published(dit, monkeypatch):
    from diffusers.schedulers import scheduling_ddpm

    noise = iter(DIT["in"]["ddpm"])
    monkeypatch.setattr(scheduling_ddpm, "randn_tensor", lambda *args, **options: next(noise))
    close(drawn(dit, "ddpm", 10), DIT["out"]["ddpm"], 1e-4)


def test_the_preset_is_that_of_the_published_command():
    """train.py: AdamW at 1e-4 without decay or clipping, averages of a constant decay, batches of 256."""
    paper = GenerationRecipe.paper()
    assert (paper.learning_rate, paper.final, paper.warmup, paper.weight_decay) == (1e-4, 1.0, 0.0, 0.0)
    assert (paper.betas, paper.clip, paper.ema, paper.ema_rise) == ((0.9, 0.999), None, 0.9999, "none")
    assert (paper.batch_size, paper.class_dropout, paper.path, paper.target) == (256, 0.1, "linear", "velocity")
    assert (paper.double_output, paper.host_init, paper.flip) == (True, "published", True)
    assert (paper.sampler, paper.sample_steps, Sampler(method="euler_maruyama").last_step) == (
        "euler_maruyama",
        250,
        0.04,
    )


@pytest.mark.parametrize("mixer", ["pom:expand=0.75", "pom:expand=2:groups=8:selection_heads=16"])
@pytest.mark.parametrize(("size", "printed"), [("L", 414), ("XL", 609)])
def test_several_widths_of_sipom_have_the_printed_parameters(mixer, size, printed):
    from polymix.mixers.spec import parse_mixer

    with torch.device("meta"):
        model = SiT.of_size(size, parse_mixer(mixer)[1], double_output=True)
    counted = sum(parameter.numel() for parameter in model.parameters())
    assert counted / 1e6 == pytest.approx(printed, abs=1.5)
    assert isinstance(model.head, nn.Linear)
