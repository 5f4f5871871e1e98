"""Distillation of generators: batches that a model makes of noise and classes, and mean squares in place of logits."""

import pytest
import torch

import polymix
from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.flow import Flow
from polymix.domains.generation.noise import noise_batches
from polymix.domains.generation.sit import SiT
from polymix.errors import DataError, OptionError, ShapeError
from polymix.train.distill import accuracy, distill, relative_error
from polymix.train.generators import prediction


def sit(**options):
    torch.manual_seed(0)
    sizes = {"image_size": 4, "patch": 1, "channels": 1, "classes": 3, "dim": 16, "depth": 2, "heads": 2}
    model = SiT(**{**sizes, **options})
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


@pytest.mark.parametrize("process", [Flow(), Flow("gvp", "noise"), Diffusion("fixed")])
def test_a_step_from_the_truth_is_the_truth(process):
    """Along the path of one image and one noise, exact predictions lead from each level to the next."""
    data, noise = torch.randn(2, 5, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    now, then = process.level(torch.linspace(0.3, 0.8, 5)), process.level(torch.linspace(0.301, 0.801, 5))
    out = noise
    if process == Flow():
        out = data - noise
    moved = process.step(out, process.noised(data, noise, now), now, then)
    assert torch.allclose(moved, process.noised(data, noise, then), atol=1e-5)  # Euler's error for curved paths


def test_every_image_passes_all_levels_once():
    batches = noise_batches(sit(), batches=8, batch_size=5, steps=8)
    times = torch.stack([batch["times"] for batch in batches])
    assert (times * 8).long().sort(0).values.equal(torch.arange(8)[:, None].expand(8, 5)), "levels are not uniform"
    assert all(batch["times"].std() > 0.1 for batch in batches), "a batch mixes levels"
    steps = torch.stack([b["times"] for b in noise_batches(sit(double_output=True), process=Diffusion(), steps=4,
                                                           batches=4, batch_size=5)])  # fmt: skip
    assert (steps.long() // 250).sort(0).values.equal(torch.arange(4)[:, None].expand(4, 5))


def test_the_images_are_those_that_the_model_draws():
    model = sit()
    one, two = sorted(noise_batches(model, batches=2, batch_size=1, steps=2), key=lambda batch: float(batch["times"]))
    velocity = prediction(model, one)
    assert torch.allclose(two["images"], one["images"] + (two["times"] - one["times"]) * velocity, atol=1e-6)


def test_classes_are_uniform_and_some_are_none():
    labels = torch.cat([batch["classes"] for batch in noise_batches(sit(), batches=1, batch_size=900, steps=1)])
    counts = labels.bincount(minlength=4) / 900
    assert (counts[:3] - 0.3).abs().max() < 0.05 and 0.05 < counts[3] < 0.15
    assert "classes" not in noise_batches(sit(classes=0), batches=1)[0]
    never = noise_batches(sit(class_dropout=0.0), batches=1, batch_size=200, steps=1)[0]["classes"]
    assert int(never.max()) == 2, "a model without 'none' was asked for it"


def test_images_of_the_user_take_the_place_of_drawn_ones():
    images = torch.full((3, 1, 4, 4), 7.0)
    batch = noise_batches(sit(), batches=1, batch_size=400, images=images)[0]
    rest = (batch["images"] - batch["times"].view(-1, 1, 1, 1) * 7) / (1 - batch["times"].view(-1, 1, 1, 1))
    assert 0.9 < rest.std() < 1.1 and abs(float(rest.mean())) < 0.1


def test_a_generator_learns_from_noise_alone_and_is_undone():
    model = sit()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    noise = noise_batches(model, batches=16, batch_size=8, steps=4)
    held = noise_batches(model, batches=2, batch_size=8, steps=4, answers=True, seed=1)
    report = polymix.convert(model, "padre", init="fresh", input=noise.input)
    done = distill(report, noise, val=held, forward=prediction, loss="squares", metric=relative_error,
                   imitate_epochs=2, epochs=3, learning_rate=2e-3)  # fmt: skip
    accuracy = done.accuracy
    assert accuracy["before"] < 1e-10 and report.metric == "relative_error"
    assert accuracy["distilled"] < accuracy["converted"] / 2 and done.fine_tuning[-1] < done.fine_tuning[0]
    host = report.undo()
    assert all(torch.equal(value, before[name]) for name, value in host.state_dict().items())


def test_in_training_mode_no_class_is_dropped():
    """The batches have "none" already: the student answers the question that the teacher was asked."""
    model = sit(class_dropout=0.9)
    batch = noise_batches(model, batches=1)[0]
    assert torch.equal(prediction(model, batch), prediction(model.train(), batch))
    assert model.training


@pytest.mark.parametrize(
    ("call", "error", "said"),
    [
        (lambda: noise_batches(sit(), images=torch.ones(2, 3, 4, 4)), ShapeError, r"images.*\(n, 1, 4, 4\)"),
        (lambda: noise_batches(sit(), steps=0), OptionError, "steps"),
        (lambda: noise_batches(sit(), dropped=1.5), OptionError, "dropped"),
        (lambda: noise_batches(torch.nn.Linear(2, 2)), OptionError, "size.*Linear"),
    ],
)
def test_mistakes_in_batches(call, error, said):
    with pytest.raises(error, match=said):
        call()


def test_mistakes_in_the_loss():
    model = sit()
    noise = noise_batches(model, batches=2, batch_size=2, steps=2)
    report = polymix.convert(model, "pom", input=noise.input)
    options = {"forward": prediction, "loss": "squares", "imitate_epochs": 0}
    with pytest.raises(OptionError, match=r"temperature.*no effect"):
        distill(report, noise, **options, temperature=3.0)
    with pytest.raises(OptionError, match="loss"):
        distill(report, noise, forward=prediction, loss="cubes")
    wrong = [{**batch, "labels": torch.zeros(2, 4)} for batch in noise]
    with pytest.raises(DataError, match=r"labels.*\(2, 4\).*\(2, 1, 4, 4\)"):
        distill(report, wrong, **options)
    for metric in (relative_error, accuracy):
        with pytest.raises(DataError, match="val"):
            distill(report, noise, val=noise, metric=metric, **options)


# Transformers of diffusers


def transformers():
    from polymix.compat import cure_torchvision

    cure_torchvision()
    diffusers = pytest.importorskip("diffusers", reason="untested: diffusers' hosts (the diffusion extra)")
    sizes = {"num_attention_heads": 2, "attention_head_dim": 8, "num_layers": 1, "sample_size": 8, "patch_size": 2,
             "norm_num_groups": 4}  # fmt: skip
    dit = diffusers.DiTTransformer2DModel(in_channels=4, out_channels=8, num_embeds_ada_norm=10, **sizes)
    pixart = diffusers.PixArtTransformer2DModel(
        cross_attention_dim=16, caption_channels=16, use_additional_conditions=False, **sizes
    )
    return dit.eval(), pixart.eval()


def captions(draw, count):
    return {"encoder_hidden_states": torch.randn(count, 5, 16, generator=draw), "encoder_attention_mask":
            torch.ones(count, 5), "added_cond_kwargs": {"resolution": None, "aspect_ratio": None}}  # fmt: skip


@pytest.mark.slow
def test_dit_and_pixart_of_diffusers():
    dit, pixart = transformers()
    with pytest.raises(OptionError, match=r"conditions.*captions"):
        noise_batches(pixart)
    for model, plan, conditions in ((dit, "padre", None), (pixart, {"*.attn1": "pom", "*.attn2": "qt"}, captions)):
        options = {"batch_size": 8, "steps": 4, "conditions": conditions}
        noise = noise_batches(model, batches=8, **options)
        assert noise.input["timestep"].dtype == torch.int64 and noise.input["hidden_states"].shape == (8, 4, 8, 8)
        held = noise_batches(model, batches=2, answers=True, seed=1, **options)
        report = polymix.convert(model, plan, init="fresh", input=noise.input)
        done = distill(report, noise, val=held, forward=prediction, loss="squares", metric=relative_error,
                        imitate_epochs=3, epochs=3, learning_rate=1e-3).accuracy  # fmt: skip
        assert done["distilled"] < done["converted"]
