"""`polymix train generation`: what a run leaves, classes, readers of pictures, and mistakes."""

import json

import pytest
import torch
from PIL import Image

from polymix.cli import main
from polymix.domains.generation import metrics
from polymix.domains.generation.data import GenerationData, Noised, load
from polymix.domains.generation.diffusion import Diffusion
from polymix.domains.generation.flow import Flow
from polymix.domains.generation.pipeline import ImagesPipeline
from polymix.domains.generation.recipe import GenerationRecipe
from polymix.domains.generation.task import GenerationTask
from polymix.errors import DataError, OptionError
from polymix.train.data.sampling import Seeded
from polymix.train.run import check_data, train
from tests.helpers import slow_but

TINY = GenerationRecipe.tiny()


def check(folder):
    return check_data(GenerationRecipe(data=folder))


@pytest.fixture(scope="module")
def by_class(tmp_path_factory):
    """The folder of a run with classes, measured twice."""
    folder = tmp_path_factory.mktemp("generation") / "run"
    train(TINY.changed(conditional=True, control=False, evaluate_every=2, guidance=1.5), folder)
    return folder


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


def picture(path, value, size=(24, 16)):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, (value, 0, 255 - value)).save(path)


def test_a_run_with_classes_measures_everything_and_names_its_sampler(by_class):
    content = json.loads((by_class / "results.json").read_text())
    (row,) = content["rows"]
    names = ["fd", "precision", "recall", "accuracy", "fd_none", "fd_real", "fd_noise", "fd_plain", "fd_none_plain",
             "accuracy_plain"]  # fmt: skip
    assert list(row["metrics"]) == names and all(type(value) is float for value in row["metrics"].values())
    assert row["directions"]["fd_plain"] == "down" and row["directions"]["accuracy_plain"] == "up"
    assert row["host"] == "SiT, given the class (heun, 2 steps, guidance 1.5)" and row["unit"] == "images"
    assert "drawn by heun, 2 steps, guidance 1.5" in content["about"]["describe"]
    assert content["pictures"] == ["predictions.png", "training.png", "guidance.png"]
    for name in content["pictures"]:
        with Image.open(by_class / name) as shown:
            assert min(shown.size) > 50, name
    assert 0 <= content["data"]["judge_accuracy"] <= 1


@pytest.mark.draws
def test_images_are_drawn_at_halvings_of_the_steps(tmp_path, monkeypatch):
    """To show how digits come about, more often than they are measured."""
    shown, save = {}, metrics.save_rows

    def save_rows(path, rows):
        shown[path.name] = [name for name, _ in rows]
        save(path, rows)

    monkeypatch.setattr(metrics, "save_rows", save_rows)
    train(TINY.changed(control=False, steps=8, evaluate_every=8), tmp_path / "run")
    assert shown["training.png"] == ["step 1", "step 2", "step 4", "step 8"]


def test_only_a_model_that_draws_by_class_is_held_to_its_classes():
    """Other images are a fair question to a model without classes; with them, its labels would name other classes."""
    data, summary = GenerationData("photographs", ("a", "b"), (1, 8, 8)), {"classes": ["a", "b", "c"]}
    GenerationTask(TINY).check_like_training(data, summary)
    with pytest.raises(DataError, match="data of the model's classes, a, b, c, got data of a, b"):
        GenerationTask(TINY.changed(conditional=True)).check_like_training(data, summary)


def test_plain_weights_are_others_than_averaged_ones(by_class):
    metrics = json.loads((by_class / "results.json").read_text())["rows"][0]["metrics"]
    assert metrics["fd_plain"] != metrics["fd"]


def test_evaluate_measures_the_same(by_class, capsys):
    status, said, error = command(capsys, "evaluate", by_class, "--json")
    assert status == 0, error
    content, metrics = json.loads(said), json.loads((by_class / "results.json").read_text())["rows"][0]["metrics"]
    assert content["unit"] == "images by heun, 2 steps, guidance 1.5"
    for name in ("fd", "fd_none", "fd_real", "accuracy"):
        assert content["metrics"][name] == pytest.approx(metrics[name], rel=1e-3), name


@pytest.mark.slow
def test_compare_trains_the_floor_and_shows_drawn_images(tmp_path, capsys):
    status, _, error = command(capsys, "compare", "--task", "generation", "--preset", "tiny", "--mixers", "pom", "--seeds",
                               "1", "--set", "steps=1", "--out", tmp_path / "out")  # fmt: skip
    assert status == 0, error
    content = json.loads((tmp_path / "out" / "results.json").read_text())
    assert [row["mixer"] for row in content["rows"]] == ["softmax", "pom", "linear_floor"]
    assert (tmp_path / "out" / "pom-0.png").is_file() and "reaches fd" in content["control"]


def test_times_and_noise_belong_to_the_sample(tmp_path):
    """So that two processes learn as one, and a resumed run as one that was never stopped."""
    images = torch.utils.data.TensorDataset(torch.randn(4, 1, 2, 2), torch.arange(4))
    samples, again = (Seeded(Noised(images, flip=False), 0) for _ in range(2))
    first, second = samples[0, 1], again[0, 1]
    assert torch.equal(first[3], second[3]) and first[2] == second[2]
    assert not torch.equal(samples[1, 1][3], first[3]) and torch.equal(samples[1, 1][0], first[0])
    flipped = [Seeded(Noised(images, flip=True), 0)[row, 1][0] for row in range(20)]
    straight = sum(torch.equal(image, first[0]) for image in flipped)
    assert 0 < straight < 20 and sum(torch.equal(image, first[0].flip(-1)) for image in flipped) == 20 - straight


def test_the_loss_is_that_of_the_flow(tmp_path):
    data = load(TINY, tmp_path, print)
    task = GenerationTask(TINY)
    model = task.build(data)
    with torch.no_grad():
        model.head.bias.normal_()
    image, label, t, noise = Noised(data.real, flip=False)[3]
    batch = image[None], torch.tensor([label]), t[None], noise[None]
    out = model((t * image + (1 - t) * noise)[None], t[None])
    assert task.loss(model, batch).item() == pytest.approx((out - (image - noise)).square().mean().item(), rel=1e-5)
    assert data.real[0][0].min() >= -1 and data.real[0][0].max() <= 1 and data.shape == (1, 8, 8)


def test_pictures_in_folders_and_without_classes(tmp_path):
    for split, count in (("train", 3), ("val", 2)):
        for name, value in (("cat", 10), ("dog", 200)):
            for place in range(count):
                picture(tmp_path / "net" / split / name / f"{place}.png", value + place)
    for place in range(10):
        picture(tmp_path / "flat" / f"{place}.jpg", 20 * place)
    recipe = TINY.changed(data=str(tmp_path / "net"), conditional=True, image_size=16, patch=4, judge_steps=1)
    data = load(recipe, tmp_path, print)
    assert data.classes == ("cat", "dog") and (len(data.real), len(data.test)) == (6, 4) and data.shape == (3, 16, 16)
    image, label = data.real[0]
    assert label == 0 and image[0, 0, 0].item() == pytest.approx(10 / 127.5 - 1)
    assert torch.equal(data.pictures(image[None])[0, :, 0, 0], torch.tensor([10, 0, 245], dtype=torch.uint8))
    flat = recipe.changed(data=str(tmp_path / "flat"), conditional=False)
    data = load(flat, tmp_path / "other", print)
    assert (
        (len(data.real), len(data.test)) == (8, 2)
        and data.judge.turns
        and GenerationTask(flat).build(data).classes == 0
    )
    with pytest.raises(DataError, match="expected a folder per class"):
        load(flat.changed(conditional=True), tmp_path / "other", print)


def test_pictures_that_cannot_be_read(tmp_path):
    for place in range(6):
        picture(tmp_path / "flat" / f"{place}.png", 20 * place)
    (tmp_path / "flat" / "3.png").write_bytes(b"nothing")
    assert [problem.split(",")[0] for problem in check(tmp_path / "flat")] == [str(tmp_path / "flat" / "3.png")]
    with pytest.raises(DataError, match=r"3\.png"):
        load(TINY.changed(data=str(tmp_path / "flat"), judge_steps=9), tmp_path, print)
    assert "which is no folder" in check(tmp_path / "none")[0]
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="with 0 pictures"):
        load(TINY.changed(data=str(tmp_path / "empty"), layout="pictures"), tmp_path, print)


@pytest.mark.parametrize(("options", "named"), [
    ({"guidance": 4.0}, "guidance"), ({"guidance": 4.0, "conditional": True, "class_dropout": 0.0}, "guidance"),
    ({"sample_steps": 0}, "sample_steps"), ({"sampler": "dopri5", "sample_steps": 9}, "sample_steps"), ({"path": "no"}, "path"),
    ({"target": "x"}, "target"), ({"patch": 3}, "patch"), ({"samples": 3}, "samples"), ({"cache": "a"}, "cache"),
    ({"guidance_channels": 3}, "guidance_channels"), ({"vae": "folder"}, "vae"),
    ({"guidance": 2.0, "conditional": True, "guidance_interval": (0.5, 0.2)}, "guidance_interval"),
    ({"process": "no"}, "process"), ({"process": "diffusion", "path": "vp"}, "path"), ({"variance": "fixed"}, "variance"),
    ({"process": "diffusion", "sampler": "heun"}, "sampler"), ({"sampler": "ddpm"}, "sampler"),
    ({"process": "diffusion", "sampler": "ddim", "sample_steps": 30}, "sample_steps"),
])  # fmt: skip
def test_options_that_cannot_be(options, named):
    with pytest.raises(OptionError) as failure:
        TINY.changed(**{"sample_steps": None, **options})
    assert failure.value.argument == named and len(str(failure.value).splitlines()) == 1


def test_a_diverging_run_stops_and_keeps_its_checkpoint(tmp_path, monkeypatch):
    own, calls = GenerationTask.loss, []

    def loss(self, model, batch):
        calls.append(batch)
        return own(self, model, batch) * (float("nan") if len(calls) == 4 else 1)

    monkeypatch.setattr(GenerationTask, "loss", loss)
    recipe = TINY.changed(control=False, checkpoint_every=2, evaluate_every=9)
    with pytest.raises(OptionError, match="loss is nan at step 4"):
        train(recipe, tmp_path / "run", data_folder=tmp_path)
    saved = torch.load(tmp_path / "run" / "checkpoint" / "last.ckpt", weights_only=True)
    weights = [value for model in saved["models"].values() for value in model.values()]
    assert saved["step"] == 2 and all(value.isfinite().all() for value in weights)
    calls.clear()
    with pytest.raises(OptionError, match="no checkpoint exists yet"):
        train(recipe.changed(checkpoint_every=9), tmp_path / "other", data_folder=tmp_path)


def test_the_papers_figures_stand_beside_its_experiment_alone(tmp_path):
    for place in range(1000):
        for name in ("0.png", "1.png"):
            file = tmp_path / f"n{place:08d}" / name
            file.parent.mkdir(exist_ok=True)
            file.touch()
    vae = {"data": tmp_path, "vae": "vae", "inception": "inception.pt"}
    published = GenerationRecipe.paper().changed(**vae)

    def paper(**options):
        return GenerationTask(published.changed(**options)).published()

    assert paper()["fid"] == 17.2 and paper(depth=24, dim=1024)["fid"] == 17.6
    assert paper(mixer="softmax", depth=24, dim=1024)["fid"] == 18.8
    for other in ({"plan": "1:1"}, {"depth": 24}, {"guidance": 4.0}, {"steps": 100}, {"inception": None},
                  {"mixer": "pom:degree=1"}, {"mixer": "pom"}, {"vae": None}, {"data": None, "vae": None}):  # fmt: skip
        assert paper(**other) is None, other
    (tmp_path / "n00000000").rename(tmp_path / "cat")
    assert paper() is None, "other pictures"


def test_the_host_and_the_sampler_by_name():
    def host_name(**options):
        return GenerationTask(GenerationRecipe(**options)).host_name(None)

    published = GenerationRecipe.paper()
    assert published.sampling().words == "euler_maruyama, 250 steps"
    guided = published.changed(guidance=4.0, guidance_channels=3, guidance_interval=(0.1, 0.9))
    assert guided.sampling().words == "euler_maruyama, 250 steps, guidance 4, of 3 channels, at t from 0.1 to 0.9"
    assert published.changed(sampler="dopri5", sample_steps=None).sampling().words == "dopri5"
    assert host_name() == "SiT, unconditional (heun, 25 steps)"
    assert host_name(path="gvp", target="noise").startswith("SiT, path gvp, target noise, unconditional")
    assert "fixed variance" in host_name(process="diffusion", variance="fixed")


def test_noise_as_the_target_of_diffusion(tmp_path):
    train(TINY.changed(path="vp", target="noise", control=False, steps=1), tmp_path / "run", data_folder=str(tmp_path))
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert "Path vp, target noise" in content["about"]["describe"] and content["rows"][0]["metrics"]["fd"] > 0
    drawn = ImagesPipeline.from_pretrained(tmp_path / "run")
    assert drawn.flow == Flow("vp", "noise") and len(drawn(num_images=2).images) == 2


@pytest.mark.parametrize("variance", ["learned", "fixed"])
def test_diffusion_trains_with_classes_and_draws_guided(tmp_path, variance, capsys):
    recipe = TINY.changed(process="diffusion", variance=variance, conditional=True, guidance=2.0, control=False,
                     steps=2, path="linear")  # fmt: skip
    train(recipe, tmp_path / "run", data_folder=tmp_path)
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    fixed = ", fixed variance" if variance == "fixed" else ""
    assert content["rows"][0]["host"] == f"DiT{fixed}, given the class (dpm++, 2 steps, guidance 2)"
    assert f"Diffusion in 1,000 steps, target noise, variance {variance}" in content["about"]["describe"]
    assert content["rows"][0]["metrics"]["fd"] > 0 and content["rows"][0]["metrics"]["fd_plain"] > 0
    pipe = ImagesPipeline.from_pretrained(tmp_path / "run")
    assert pipe.flow == Diffusion(variance) and pipe.model.double_output == (variance == "learned")
    first = pipe(class_labels=3, method="ddpm", num_inference_steps=5, output_type="pt").images
    pipe.save_pretrained(tmp_path / "copy")
    again = ImagesPipeline.from_pretrained(tmp_path / "copy")
    assert torch.equal(again(class_labels=3, method="ddpm", num_inference_steps=5, output_type="pt").images, first)
    draw = ("generate", tmp_path / "run", "--class", "3", "--num", "2", "--out", tmp_path / "drawn.png")
    status, _, error = command(capsys, *draw, "--sampler", "ddim", "--steps", "10", "--guidance", "4")
    assert status == 0 and (tmp_path / "drawn.png").is_file(), error
    status, _, error = command(capsys, *draw, "--sampler", "heun")
    assert status == 2 and "'heun' for a model of diffusion" in error and "ddpm, ddim, dpm++" in error


def test_the_picture_of_guidance_says_how_many_images_the_judge_names_right(tmp_path, monkeypatch):
    """The judge here names every image 3, which a tenth of the images shall be."""
    recipe = TINY.changed(conditional=True)
    data = load(recipe, tmp_path, print)
    torch.nn.init.zeros_(data.judge.head.weight)
    data.judge.head.bias.data = torch.eye(10)[3]
    shown = []
    monkeypatch.setattr("polymix.domains.generation.metrics.save_rows", lambda path, rows: shown.extend(rows))
    task = GenerationTask(recipe)
    task.draw(task.build(data).eval(), data, tmp_path)
    assert [name for name, _ in shown] == [f"ω = {omega}, 10% right" for omega in (1, 2, 4)]
    assert all(images.shape == (20, 1, 8, 8) for _, images in shown)


@pytest.mark.parametrize("mixer", slow_but(["padre"], ["softmax", "pom", "padre"]))
def test_a_run_at_a_higher_resolution_starts_from_a_lower_one(tmp_path, mixer):
    """Positions are computed for the new size; every weight is the old one."""
    small = TINY.changed(mixer=mixer, control=False, steps=1)
    train(small, tmp_path / "small", data_folder=tmp_path)
    large = small.changed(image_size=16, learning_rate=1e-12, init=str(tmp_path / "small"))
    train(large, tmp_path / "large", data_folder=tmp_path)
    before, after = (torch.load(tmp_path / name / "model.pt", weights_only=True) for name in ("small", "large"))
    assert before.keys() == after.keys() and all(
        torch.allclose(before[name], after[name], atol=1e-9) for name in before
    )
    model = ImagesPipeline.from_pretrained(tmp_path / "large").model
    assert model.grid == (16, 16) and model.position.shape[0] == 256


def test_a_resumed_run_keeps_what_it_drew(tmp_path, monkeypatch):
    """The picture of the training has the images from before the interruption, too."""
    shown, save = {}, metrics.save_rows

    def save_rows(path, rows):
        shown[path.name] = [name for name, _ in rows]
        save(path, rows)

    class Killed(Exception):
        pass

    own = GenerationTask.prepare

    def prepare(self, model, data, step):
        if step == 4 and not shown:
            shown["stopped"] = []
            raise Killed
        own(self, model, data, step)

    monkeypatch.setattr(metrics, "save_rows", save_rows)
    monkeypatch.setattr(GenerationTask, "prepare", prepare)
    recipe = TINY.changed(control=False, steps=8, evaluate_every=8, checkpoint_every=1)
    with pytest.raises(Killed):
        train(recipe, tmp_path / "run")
    train(recipe, tmp_path / "run", resume=True)
    assert shown["training.png"] == ["step 1", "step 2", "step 4", "step 8"]
