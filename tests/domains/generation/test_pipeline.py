"""Drawing with a trained model: the pipeline, `polymix generate`, saving, and what cannot be drawn."""

import pytest
import torch
from PIL import Image

import polymix
from polymix.cli import main
from polymix.domains.generation.flow import Flow, Sampler
from polymix.domains.generation.pipeline import ImagesPipeline, write_generator
from polymix.domains.generation.recipe import GenerationRecipe
from polymix.domains.generation.sit import SiT
from polymix.errors import DataError, OptionError, ShapeError
from polymix.mixers.spec import parse_mixer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A model by class as a run leaves it, with weights that do not draw zeros."""
    place = tmp_path_factory.mktemp("generator")
    model = random_model(classes=3)
    torch.save(model.state_dict(), place / "model.pt")
    write_generator(place, model, ("cat", "dog", "8"), Flow("gvp", "noise"), Sampler(steps=2, guidance=2.0), None)
    return place


def random_model(**options):
    torch.manual_seed(0)
    model = SiT(parse_mixer("pom")[1], image_size=4, patch=1, channels=1, dim=8, heads=2, depth=1, **options)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.3)
    return model.eval()


def command(capsys, *arguments):
    with pytest.raises(SystemExit) as stop:
        main([*map(str, arguments), "--threads", "1"])
    return stop.value.code or 0, *capsys.readouterr()


def test_the_pipeline_draws_what_the_sampler_draws(folder):
    pipe = ImagesPipeline.from_pretrained(folder)
    assert pipe.flow == Flow("gvp", "noise") and pipe.sampler == Sampler(steps=2, guidance=2.0)
    drawn = pipe(class_labels=["dog", 2], seed=5, output_type="pt").images
    expected = Sampler(steps=2, guidance=2.0).sample(pipe.model, (4, 4), seeds=(5, 6), labels=[1, 2], flow=pipe.flow)
    assert torch.allclose(drawn, (expected.clamp(-1, 1) + 1) / 2, atol=1e-6)
    other = pipe(class_labels=[1, 2], num_inference_steps=3, guidance_scale=1, method="euler", seeds=[5, 6],
                 output_type="pt", batch_size=1).images  # fmt: skip
    expected = Sampler(method="euler", steps=3).sample(pipe.model, (4, 4), seeds=(5, 6), labels=[1, 2], flow=pipe.flow)
    assert torch.allclose(other, (expected.clamp(-1, 1) + 1) / 2, atol=1e-6)
    pictures = pipe(class_labels="cat", num_images=3).images
    assert [picture.size for picture in pictures] == [(4, 4)] * 3 and pictures[0].mode == "L"
    assert pictures[0].tobytes() != pictures[1].tobytes(), "each image has a seed of its own"


@pytest.mark.parametrize("converted", [False, True])
def test_a_saved_pipeline_draws_the_same(folder, tmp_path, converted):
    pipe = ImagesPipeline.from_pretrained(folder)
    if converted:
        model = SiT(image_size=4, patch=1, channels=1, dim=8, heads=2, depth=1, classes=3)
        polymix.convert(model, "pom", init="fresh")
        pipe = ImagesPipeline(model, classes=pipe.classes, flow=pipe.flow, sampler=pipe.sampler)
    pipe.save_pretrained(tmp_path / "saved")
    again = ImagesPipeline.from_pretrained(tmp_path / "saved")
    arguments = {"class_labels": [0, 1], "output_type": "pt"}
    assert torch.equal(again(**arguments).images, pipe(**arguments).images)
    assert (again.flow, again.sampler, again.classes) == (pipe.flow, pipe.sampler, pipe.classes)


@pytest.mark.parametrize(("options", "named", "error"), [
    ({"class_labels": 3}, "class_labels", OptionError), ({"class_labels": "bird"}, "class_labels", OptionError),
    ({"class_labels": -1}, "class_labels", OptionError), ({"class_labels": True}, "class_labels", OptionError),
    ({"class_labels": 0, "num_inference_steps": 0}, "steps", OptionError), ({"num_images": 0}, "num_images", OptionError),
    ({"class_labels": [0, 1], "num_images": 3}, "labels", ShapeError), ({"guidance_scale": 4}, "guidance", OptionError),
    ({"class_labels": 0, "method": "x"}, "method", OptionError), ({"output_type": "np"}, "output_type", OptionError),
    ({"class_labels": 0, "seeds": [1, 2], "num_images": 3}, "seeds", OptionError), ({"seed": -1}, "seed", OptionError),
])  # fmt: skip
def test_what_cannot_be_drawn(folder, options, named, error):
    with pytest.raises(error) as failure:
        ImagesPipeline.from_pretrained(folder)(**options)
    assert failure.value.argument == named and len(str(failure.value).splitlines()) == 1


def test_models_without_classes_or_without_none(tmp_path):
    free = ImagesPipeline(random_model(classes=0))
    assert len(free(num_images=2, num_inference_steps=1).images) == 2
    with pytest.raises(OptionError, match="conditional=True"):
        free(class_labels=1)
    without_none = ImagesPipeline(random_model(classes=3, class_dropout=0.0), classes=("a", "b", "c"))
    with pytest.raises(OptionError, match="no class 'none'"):
        without_none(class_labels=1, guidance_scale=4)
    with pytest.raises(OptionError, match="1 names for a model of 3 classes"):
        ImagesPipeline(random_model(classes=3), classes=("a",))


def test_damaged_and_foreign_folders(folder, tmp_path):
    with pytest.raises(DataError, match=r"generator\.json"):
        ImagesPipeline.from_pretrained(tmp_path)
    for name in ("generator.json", "model.pt"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "model.pt").write_bytes(b"nothing")
    with pytest.raises(DataError, match="cannot be read"):
        ImagesPipeline.from_pretrained(tmp_path)
    (tmp_path / "generator.json").write_text('{"schema": "polymix.generator/2"}')
    with pytest.raises(DataError, match="another program or version"):
        ImagesPipeline.from_pretrained(tmp_path)
    with pytest.raises(OptionError, match="a model of pixels"):
        ImagesPipeline.from_pretrained(folder, vae=tmp_path)


def test_generate_writes_a_sheet(folder, tmp_path, capsys):
    out = tmp_path / "samples.png"
    status, said, error = command(capsys, "generate", folder, "--class", "dog", "--num", "5", "--steps", "3",
                                  "--guidance", "4", "--out", out)  # fmt: skip
    assert status == 0 and "5 images" in said, error
    expected = ImagesPipeline.from_pretrained(folder)(1, num_images=5, num_inference_steps=3, guidance_scale=4).images
    with Image.open(out) as sheet:
        factor = 16  # 4 pixels are shown as 64
        assert sheet.size == (2 * 65 - 1, 3 * 65 - 1)
        first = sheet.crop((0, 0, 64, 64)).resize((4, 4), Image.Resampling.NEAREST).convert("L")
        assert factor * 4 == 64 and first.tobytes() == expected[0].tobytes()


@pytest.mark.parametrize(("words", "named"), [
    (("--class", "7"), "--class"), (("--prompt", "x"), "--prompt"), (("--steps", "0"), "--steps"),
    (("--guidance", "4"), "--guidance"), (("--out", "no/such/folder.png"), "--out"), (("--out", "a.jpg"), "--out"),
    (("--beams", "2"), "--beams"), (("--vae", "x"), "--vae"),
])  # fmt: skip
def test_mistakes_of_generate_are_one_line(folder, tmp_path, capsys, monkeypatch, words, named):
    monkeypatch.chdir(tmp_path)
    status, _, error = command(capsys, "generate", folder, *words)
    assert status == 2 and f"`{named}`" in error and not list(tmp_path.iterdir())


def test_options_of_images_with_another_model(tmp_path, capsys):
    status, _, error = command(capsys, "generate", tmp_path, "--class", "3")
    assert status == 2 and "`--class`" in error and "continues texts" in error
    status, _, error = command(capsys, "generate", tmp_path / "missing", "--class", "3")
    assert status == 2 and "does not exist" in error, "a missing folder was taken for one of a language model"


def test_the_recipe_tells_how_images_are_drawn():
    recipe = GenerationRecipe(conditional=True, guidance=4.0, guidance_channels=1, guidance_interval=(0.2, 0.8))
    sampler = recipe.make_sampler()
    assert (sampler.steps, sampler.guidance, sampler.guidance_channels) == (25, 4.0, 1)
    assert recipe.make_sampler(1.0) == Sampler(steps=25), "options that guidance alone uses go with it"
    assert recipe.changed(sampler="dopri5").make_sampler().method == "dopri5"
