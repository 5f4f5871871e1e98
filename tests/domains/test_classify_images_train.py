"""Training on images: repeatable, honest about divergence, decay where it belongs; and as a task of `polymix train`."""

import json

import pytest
import torch
from torch import nn

import polymix
from polymix.domains.classify.data import load_scenes
from polymix.domains.classify.recipe import ClassifyRecipe
from polymix.domains.classify.task import ClassifyTask
from polymix.errors import OptionError
from polymix.models import VisionTransformer
from polymix.train.data.images import load_digits
from polymix.train.in_memory import train_in_memory
from polymix.train.optimizers import decay_groups
from polymix.train.recipe import Recipe
from polymix.train.registry import named_recipe
from polymix.train.run import train
from polymix.train.saved import SavedRun

DATA = load_digits()
SHORT = ClassifyRecipe(image_size=8, epochs=1, batch_size=256)


def host(config=None):
    return VisionTransformer(config or polymix.PomConfig(), image_size=8, patch_size=2, dim=16, depth=1, classes=10,
                             channels=1, mlp_ratio=2)  # fmt: skip


def fitted(build=host, on_step=lambda step: None, **options):
    task = ClassifyTask(SHORT.changed(**options))
    return train_in_memory(task, DATA, build, on_step=on_step), task


def test_the_same_seed_gives_the_same_model():
    (first, task), (second, _) = fitted(seed=3), fitted(seed=3)
    assert first.details(task, DATA) == second.details(task, DATA)
    assert first.losses == second.losses
    assert all(torch.equal(p, q) for p, q in zip(first.model.parameters(), second.model.parameters(), strict=True))
    assert fitted(seed=4)[0].losses != first.losses


def test_it_learns():
    trained, task = fitted(lambda: host(polymix.PadreConfig()), epochs=10, batch_size=64)
    details = trained.details(task, DATA)
    assert details["metrics"]["accuracy"] > 0.7
    assert len(trained.losses) == 225 and trained.losses[-1] < trained.losses[0]
    assert details["labels"] == DATA.test.labels.tolist()
    hits = [answer == label for answer, label in zip(details["predictions"], details["labels"], strict=True)]
    assert sum(hits) / len(hits) == pytest.approx(details["metrics"]["accuracy"])


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
def test_steps_are_told(precision):
    steps = []
    fitted(on_step=steps.append, epochs=3, batch_size=512, precision=precision)
    assert steps == list(range(1, 10))


def test_divergence_is_an_error_at_once():
    class Broken(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor(float("nan")))

        def forward(self, x):
            return self.w * x.flatten(1)[:, :10]

    steps = []
    with pytest.raises(OptionError, match=r"learning_rate.*step 1"):
        fitted(Broken, on_step=steps.append)
    assert not steps


@pytest.mark.parametrize("clip", ["none", 0.01])
def test_the_gradient_is_clipped_only_where_the_recipe_says_so(clip):
    """A step of plain descent at a rate of 1 moves the weights by the gradient itself."""

    class Descent(ClassifyTask):
        def optimizer(self, model):
            self.before = [weight.detach().clone() for weight in model.parameters()]
            return torch.optim.SGD(model.parameters(), lr=1.0)

    task = Descent(SHORT.changed(steps=1, warmup=0.0, log_every=1, clip=clip))
    trained = train_in_memory(task, DATA, host)
    moves = [after - before for after, before in zip(trained.model.parameters(), task.before, strict=True)]
    norm = trained.latest["gradient_norm"]
    moved = torch.stack([move.norm() for move in moves]).norm().item()
    assert norm > 0.01 and moved == pytest.approx(norm if clip == "none" else clip, rel=1e-3)


def test_decay_skips_vectors_and_what_a_mixer_exempts():
    model = host()
    decayed, rest = decay_groups(model, Recipe(weight_decay=0.05))
    assert (decayed["weight_decay"], rest["weight_decay"]) == (0.05, 0.0)
    alpha = model.blocks[0].mixer.alpha
    assert any(p is alpha for p in rest["params"])
    assert all(p.ndim > 1 for p in decayed["params"])
    assert len(decayed["params"]) + len(rest["params"]) == len(list(model.parameters()))
    (whole,) = decay_groups(model, Recipe(weight_decay=0.05, decay="all"))
    assert whole["weight_decay"] == 0.05 and len(whole["params"]) == len(list(model.parameters()))


def test_an_interrupt_is_a_keyboard_interrupt():
    def stop(step):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fitted(on_step=stop)


# As a task

TINY = ClassifyRecipe(image_size=8, dim=16, depth=1, steps=30, batch_size=128, evaluate_every=15, log_every=5)


@pytest.mark.slow
@pytest.mark.draws
def test_a_recipe_leaves_a_model_that_the_report_says_how_to_load(tmp_path):
    numbers = train(TINY, tmp_path)
    results = json.loads((tmp_path / "results.json").read_text())
    assert results["metrics"] == {name: numbers[name] for name in ("accuracy", "top_5", "val_loss")}
    report = (tmp_path / "report.md").read_text()
    assert "confusion.png" in report and "1,438 training images" in report
    scope = {}
    exec(report.split("```python")[1].split("```")[0], scope)
    with torch.no_grad():
        hits = scope["model"].eval()(DATA.normalise(DATA.test.images)).argmax(1) == DATA.test.labels
    assert hits.float().mean().item() == pytest.approx(numbers["accuracy"])


@pytest.mark.parametrize(("changes", "named"), [
    ({"patch_size": 3}, "patch_size"), ({"mixer": "pomm"}, "pomm"), ({"depth": 0}, "depth"), ({"label_smoothing": 2}, "label_smoothing"),
])  # fmt: skip
def test_what_a_recipe_cannot_be_is_told_and_nothing_is_written(tmp_path, changes, named):
    with pytest.raises(polymix.errors.PolymixError, match=named):
        train(TINY.changed(**changes), tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_default_recipe_is_sound():
    recipe = named_recipe("classify")
    assert recipe.data is None and recipe.mixer == "pom" and recipe.default_data == "digits"


# Digit scenes, the default data of `polymix compare`

SCENES = ClassifyRecipe(default_data="scenes", patch_size=4, dim=64, depth=3, heads=4, mlp_ratio=2, epochs=6)


def test_the_model_of_compare_is_a_recipe(tmp_path):
    recipe = SCENES.changed(mixer="softmax")
    task = ClassifyTask(recipe)
    images = task.load(tmp_path)
    model = task.build(images)
    expected = VisionTransformer(polymix.SoftmaxConfig(heads=4), image_size=16, patch_size=4, dim=64, depth=3, mlp_ratio=2.0,
                                 channels=1, classes=10)  # fmt: skip
    assert [block.mixer.heads for block in model.blocks] == [4] * 3
    assert {name: value.shape for name, value in model.state_dict().items()} == {
        name: value.shape for name, value in expected.state_dict().items()
    }
    assert images.counts == (6000, 1000) and images.name == "digit scenes"
    assert recipe.for_data(task.epoch(images, 1)).steps == round(6 * 6000 / 64 + 0.499)


def test_a_seed_is_that_of_the_scenes_too(tmp_path):
    one, two = (ClassifyTask(SCENES.changed(seed=seed)).load(tmp_path) for seed in (0, 1))
    assert torch.equal(one.train.images, load_scenes().train.images)
    assert not torch.equal(one.train.images, two.train.images) and not torch.equal(one.test.images, two.test.images)


def test_scenes_are_trained_on_and_measured_again(tmp_path):
    numbers = train(SCENES.changed(dim=8, depth=1, epochs=None, steps=3, control=False), tmp_path / "run")
    run = SavedRun.of(tmp_path / "run")
    details = run.measure()
    assert details["metrics"]["accuracy"] == pytest.approx(numbers["accuracy"]) and len(details["predictions"]) == 1000
    report = (tmp_path / "run" / "report.md").read_text()
    assert "SavedRun" in report, "heads are no option of parse_mixer's text"


@pytest.mark.parametrize(("options", "named"), [
    ({"default_data": "scenes", "image_size": 32}, "image_size"), ({"data": "x", "default_data": "scenes"}, "default_data"),
    ({"default_data": "letters"}, "default_data"), ({"host": "resnet50", "heads": 2}, "heads"),
])  # fmt: skip
def test_options_of_the_default_data_are_refused_where_they_mean_nothing(options, named, tmp_path):
    with pytest.raises(OptionError) as caught:
        train(ClassifyRecipe(**options), tmp_path / "out")
    assert caught.value.argument == named
