"""Training on images: repeatable, honest about divergence, decay where it belongs; and as a task of `polymix train`."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

import polymix
from polymix.models import VisionTransformer
from polymix.tasks.classify import ImageRecipe, Schedule, load_digits
from polymix.tasks.classify.training import train
from polymix.tasks.recipe import load_recipe
from polymix.tasks.runner import train as run
from polymix.tasks.trainer import decay_groups

DATA = load_digits()
SHORT = Schedule(epochs=1, batch_size=256)


def host(config=None):
    return VisionTransformer(config or polymix.PomConfig(), image_size=8, patch_size=2, dim=16, depth=1, classes=10,
                             channels=1, mlp_ratio=2)  # fmt: skip


def test_the_same_seed_gives_the_same_model():
    (a, first), (b, second) = train(host, DATA, SHORT, seed=3), train(host, DATA, SHORT, seed=3)
    assert first.accuracy == second.accuracy
    assert first.losses == second.losses
    assert all(torch.equal(p, q) for p, q in zip(a.parameters(), b.parameters(), strict=True))
    assert train(host, DATA, SHORT, seed=4)[1].losses != first.losses


def test_it_learns():
    _, outcome = train(lambda: host(polymix.PadreConfig()), DATA, Schedule(epochs=10), seed=0)
    assert outcome.accuracy > 0.7
    assert len(outcome.losses) == 10
    assert outcome.losses[-1] < outcome.losses[0]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_epochs_are_told(dtype):
    epochs = []
    train(host, DATA, Schedule(epochs=3, batch_size=512), seed=0, dtype=dtype, on_epoch=epochs.append)
    assert epochs == [1, 2, 3]


def test_divergence_is_no_accuracy():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(float("nan")))

        def forward(self, x):
            return self.w * x.flatten(1)[:, :10]

    _, outcome = train(Broken, DATA, Schedule(epochs=5), seed=0)
    assert outcome.accuracy is None
    assert len(outcome.losses) == 1, "training stops at once"


def test_decay_skips_vectors_and_what_a_mixer_exempts():
    model = host()
    decayed, rest = decay_groups(model, 0.05)
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.05, 0.0)
    alpha = model.blocks[0].mixer.alpha
    assert any(p is alpha for p in rest["params"])
    assert all(p.ndim > 1 for p in decayed["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))


def test_an_interrupt_is_a_keyboard_interrupt():
    """Lightning would answer Ctrl-C with exit(1)."""

    def stop(epoch):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        train(host, DATA, SHORT, seed=0, on_epoch=stop)


# As a task

TINY = ImageRecipe(image_size=8, dim=16, depth=1, steps=30, batch_size=128, evaluate_every=15, log_every=5)


def test_a_recipe_leaves_a_model_that_the_report_says_how_to_load(tmp_path):
    numbers = run(TINY, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["metrics"] == {name: numbers[name] for name in ("accuracy", "top_5", "val_loss")}
    report = (tmp_path / "report.md").read_text()
    assert "confusion.png" in report and "1,438 training images" in report
    said = {}
    exec(report.split("```python")[1].split("```")[0], said)
    images, labels = DATA.test
    with torch.no_grad():
        hits = said["model"].eval()(DATA.normalise(images)).argmax(1) == labels
    assert hits.float().mean().item() == pytest.approx(numbers["accuracy"])


@pytest.mark.parametrize(("changes", "named"), [
    (["patch_size=3"], "patch_size"), (["mixer=pomm"], "pomm"), (["depth=0"], "depth"), (["label_smoothing=2"], "label_smoothing"),
])  # fmt: skip
def test_what_a_recipe_cannot_be_is_told_and_nothing_is_written(tmp_path, changes, named):
    with pytest.raises(polymix.errors.PolymixError, match=named):
        run(TINY.changed(changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_default_recipe_is_sound():
    recipe = load_recipe(Path(__file__).parents[2] / "recipes" / "classify.py")
    assert recipe.data is None and recipe.mixer == "pom"


def test_old_names_keep_working():
    with pytest.warns(DeprecationWarning, match="polymix.tasks.classify.training"):
        from polymix.tasks.classify import Recipe
    assert Recipe(epochs=2).epochs == 2
