"""HTR-VT under `--preset paper` against arrays of its authors' code: model, loss, gradients, rates, averaged weights."""

import math

import numpy as np
import pytest
import torch
from torch import nn

from polymix.domains.handwriting.augment import _homographies, _warped
from polymix.domains.handwriting.recipe import HandwritingRecipe
from polymix.domains.handwriting.task import HandwritingTask, published_rate
from polymix.train.loop import Watch, averaged, fit
from polymix.train.place import Place
from tests.helpers import close, published_host

PARTS, OPTIONS = published_host("htr_vt")


def task(**options):
    sizes = {name: OPTIONS[name] for name in ("height", "width", "dim", "depth", "heads")}
    return HandwritingTask(HandwritingRecipe.paper().changed(mixer="softmax", **sizes, **options))


def model_of(chosen):
    model = chosen.sized(OPTIONS["classes"])
    state = model.state_dict()
    counters = {name: value for name, value in state.items() if name.endswith("num_batches_tracked")}
    model.load_state_dict({**counters, **PARTS["w"]})
    return model.eval()


def batch():
    inputs = PARTS["in"]
    return {"images": inputs["lines"] / 255, "labels": inputs["labels"], "lengths": inputs["lengths"]}


def test_published_weights_read_as_published():
    """The positions are those of a grid; with those of a line no logit would be right."""
    chosen = task()
    model = model_of(chosen)
    close(model(batch()["images"]), PARTS["out"]["logits"], 1e-5)
    assert (model_of(task(positions="line"))(batch()["images"]) - PARTS["out"]["logits"]).abs().max() > 0.1
    loss = chosen.loss(model, batch())
    close(loss, PARTS["out"]["loss"], 1e-5)
    loss.backward()
    named = dict(model.named_parameters())
    for name, gradient in PARTS["grad"].items():
        close(named[name].grad, gradient, 1e-4)


def test_a_character_of_a_short_line_does_not_count_more():
    """With loss_per="character" the line of 2 characters has the weight of that of 7."""
    chosen = task(loss_per="character")
    model, whole = model_of(chosen), batch()
    assert chosen.loss(model, whole) < PARTS["out"]["loss"] / 2
    lines = []
    for row, labels in enumerate(whole["labels"].split(whole["lengths"].tolist())):
        one = {"images": whole["images"][row : row + 1], "labels": labels, "lengths": whole["lengths"][row : row + 1]}
        lines.append(task().loss(model, one))
    close(sum(lines) / 2, PARTS["out"]["loss"], 1e-5)


def test_fresh_weights_are_xaviers():
    chosen = task()
    model = chosen.build(type("Data", (), {"characters": "x" * (OPTIONS["classes"] - 1)}))
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    assert len(layers) == 1 + 4 * OPTIONS["depth"]
    for name, layer in layers.items():
        expected = math.sqrt(2 / (layer.in_features + layer.out_features))
        assert layer.weight.std().item() == pytest.approx(expected, rel=0.15), name
        assert not layer.bias.any()
    assert HandwritingRecipe.paper().host_init == "published" and HandwritingRecipe().host_init == "own"


def test_rates_are_published():
    shares = published_rate(1000, 0.01, 1e-4)
    np.testing.assert_allclose([1e-3 * shares(step) for step in range(999)], PARTS["out"]["rates"], rtol=1e-9)
    paper = HandwritingRecipe.paper()
    assert (paper.schedule, paper.warmup * paper.steps) == ("htr_vt", 1000)
    assert paper.learning_rate * paper.final == pytest.approx(1e-7)


def test_averaged_weights_count_half_steps_and_average_statistics():
    norm = nn.BatchNorm1d(2)
    average = averaged(norm, 0.9, "half_steps", buffers=True)
    for values, expected in zip(PARTS["in"]["ema"], PARTS["out"]["ema"], strict=True):
        with torch.no_grad():
            norm.weight.copy_(values[0])
            norm.running_mean.copy_(values[1])
            norm.num_batches_tracked += 1
        average.update_parameters(norm)
        torch.testing.assert_close(torch.stack((average.module.weight, average.module.running_mean)), expected)
    assert average.module.num_batches_tracked == len(PARTS["in"]["ema"])


def test_both_passes_of_sam_see_the_same_images(tmp_path):
    recipe = HandwritingRecipe.tiny().changed(
        synthetic_train=4, synthetic_test=2, batch_size=4, steps=4, dim=8, width=128, sam=0.05, augment=True, accumulate=2,
        mask_ratio=0.4,
    )  # fmt: skip
    seen = []

    class Watched(HandwritingTask):
        def loss(self, model, batch):
            seen.append(batch["images"])
            return super().loss(model, batch)

    chosen = Watched(recipe)
    data = chosen.load(tmp_path)
    fit(chosen, data, chosen.build(data), Place(recipe), Watch())
    for step in range(4):
        first, second, again_first, again_second = seen[4 * step : 4 * step + 4]
        assert torch.equal(first, again_first) and torch.equal(second, again_second)
    plain = [sample.image for sample in data.train]
    assert any(all(not torch.equal(image, line) for line in plain) for images in seen for image in images)


def test_every_image_has_a_warp_of_its_own_along_one_axis():
    """One for the whole batch would move the level stroke of every image alike."""
    torch.manual_seed(0)
    images = torch.ones(40, 1, 64, 256)
    images[:, :, 20:24, :] = 0
    warped = _warped(images)
    assert warped.shape == images.shape and len({image.sum().item() for image in warped}) > 30
    assert warped.amin() >= 0 and warped.amax() <= 1


def test_a_warp_takes_the_moved_corners_to_those_of_the_image():
    generator = torch.Generator().manual_seed(0)
    targets = torch.tensor([[0, 0], [255, 0], [255, 63], [0, 63]], dtype=torch.float64)
    corners = targets + 16 * torch.rand(5, 4, 2, generator=generator, dtype=torch.float64) - 8
    reached = torch.nn.functional.pad(corners, (0, 1), value=1.0) @ _homographies(corners, targets).transpose(1, 2)
    torch.testing.assert_close(reached[..., :2] / reached[..., 2:], targets.expand(5, 4, 2))


def test_the_preset_is_that_of_the_published_commands():
    """run/iam.sh, utils/option.py and train.py."""
    paper = HandwritingRecipe.paper()
    assert (paper.batch_size, paper.steps, paper.learning_rate, paper.weight_decay) == (128, 100_000, 1e-3, 0.5)
    assert (paper.betas, paper.clip, paper.decay, paper.sam) == ((0.9, 0.99), None, "all", 0.05)
    assert (paper.ema, paper.ema_rise, paper.ema_buffers, paper.keep) == (0.9999, "half_steps", True, "best")
    assert (paper.mask_ratio, paper.span, paper.width, paper.height) == (0.4, 8, 512, 64)
    assert (paper.positions, paper.loss_per, paper.interpolation, paper.augment) == ("grid", "line", "bicubic", True)
    assert (paper.dim, paper.depth, paper.heads, paper.mlp_ratio, paper.evaluate_every) == (768, 4, 6, 4, 1000)
