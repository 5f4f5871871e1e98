"""Latents: an autoencoder from a folder, the cache, training on it, and FID's network from a file."""

import json

import pytest
import torch
from PIL import Image

from polymix.convert.adapters.libraries import load_library
from polymix.domains.generation import latents
from polymix.domains.generation.data import load
from polymix.domains.generation.inception import Inception, _mean
from polymix.domains.generation.latents import Autoencoder, Cache
from polymix.domains.generation.pipeline import ImagesPipeline
from polymix.domains.generation.recipe import GenerationRecipe
from polymix.domains.generation.task import GenerationTask
from polymix.errors import DataError, OptionError
from polymix.train.data.vision import torchvision
from polymix.train.registry import chosen_recipe
from polymix.train.run import check_data, check_recipe, train

pytest.importorskip("diffusers", reason="untested: autoencoders, for diffusers")
TINY = GenerationRecipe.tiny()


def check(folder):
    return check_data(GenerationRecipe(data=folder))


def autoencoder(folder, channels=4, seed=0):
    AutoencoderKL = load_library("diffusers").AutoencoderKL
    torch.manual_seed(seed)
    AutoencoderKL(latent_channels=channels, block_out_channels=(4, 4), norm_num_groups=2, layers_per_block=1,
                  down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
                  scaling_factor=0.5, shift_factor=0.1).save_pretrained(folder)  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def vae(tmp_path_factory):
    return autoencoder(tmp_path_factory.mktemp("vae"))


@pytest.fixture(scope="module")
def net(tmp_path_factory):
    """Pictures of two classes."""
    root = tmp_path_factory.mktemp("net")
    for name, value in (("cat", 10), ("dog", 200)):
        for split, count in (("train", 7), ("val", 3)):
            (root / split / name).mkdir(parents=True)
            for place in range(count):
                Image.new("RGB", (8, 8), (value, 5 * place, 0)).save(root / split / name / f"{place}.png")
    return root


def test_the_command_line_takes_data_and_an_autoencoder_together(net, vae):
    recipe = chosen_recipe("generation", preset="tiny", options={"vae": str(vae), "image_size": "8", "data": str(net)})
    assert (recipe.vae, recipe.data, recipe.steps) == (str(vae), str(net), 4)


def recipe_for(net, vae, cache, **options):
    return TINY.changed(data=str(net), vae=str(vae), cache=str(cache), conditional=True, judge_steps=2, **options)


def test_the_autoencoder_shifts_and_scales(vae):
    autoencoder = Autoencoder.load(vae)
    assert (autoencoder.channels, autoencoder.factor, autoencoder.scaling, autoencoder.shift) == (4, 2, 0.5, 0.1)
    images = torch.rand(2, 3, 8, 8) * 2 - 1
    spread = autoencoder.network.encode(images).latent_dist
    moments = autoencoder.encode(images)
    assert moments.shape == (2, 2, 4, 4, 4)
    torch.testing.assert_close(moments[:, 0], (spread.mean - 0.1) * 0.5)
    torch.testing.assert_close(moments[:, 1], spread.std * 0.5)
    torch.testing.assert_close(autoencoder.decode(moments[:, 0]), autoencoder.network.decode(spread.mean).sample)


def test_a_cache_is_written_once_and_continued(net, vae, tmp_path, monkeypatch):
    monkeypatch.setattr(latents, "SHARD", 5)
    recipe, own, encoded = recipe_for(net, vae, tmp_path / "cache", flip=True), Autoencoder.encode, []

    def encode(self, images):
        encoded.append(len(images))
        if len(encoded) == 6:
            raise KeyboardInterrupt
        return own(self, images)

    monkeypatch.setattr(Autoencoder, "encode", encode)
    with pytest.raises(KeyboardInterrupt):
        load(recipe, tmp_path, print)
    with pytest.raises(DataError, match="not finished"):
        Cache.read(tmp_path / "cache")
    assert sum(encoded[:4]) == 20 and len(list((tmp_path / "cache").glob("*.npy"))) == 2
    data = load(recipe, tmp_path, print)
    assert sum(encoded[6:]) == 2 * (4 + 6), "the two files that were there are not made again"
    count = len(encoded)
    again = load(recipe, tmp_path, print)
    assert len(encoded) == count and data.shape == (4, 4, 4) and (len(data.real), len(data.test)) == (14, 6)
    pictures = [torch.full((3, 8, 8), 0.0)] * 2
    pictures = torch.stack([torch.tensor([v / 127.5 - 1 for v in (200, 10, 0)]).view(3, 1, 1).expand(3, 8, 8)])
    expected = own(Autoencoder.load(vae), pictures)[0, 0]
    latent, label = again.real[9]
    assert label == 1 and torch.allclose(latent, expected, atol=2e-3)
    assert torch.equal(again.real[9][0], latent) and not torch.equal(again.train[9][0], again.train[9][0])
    with pytest.raises(OptionError, match="flip"):
        load(recipe.changed(data=str(tmp_path / "cache"), cache=None, flip=False), tmp_path, print)


def test_training_on_latents_and_drawing_pictures(net, vae, tmp_path):
    recipe = recipe_for(net, vae, tmp_path / "cache", control=False, patch=2)
    train(recipe, tmp_path / "run")
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert content["data"]["shape"] == [4, 4, 4] and content["rows"][0]["metrics"]["fd"] > 0
    pipe = ImagesPipeline.from_pretrained(tmp_path / "run")
    assert pipe(class_labels=["cat", "dog"]).images[1].size == (8, 8)
    other, wide = autoencoder(tmp_path / "other", seed=1), autoencoder(tmp_path / "wide", 8)
    with pytest.raises(OptionError, match="another autoencoder"):
        ImagesPipeline.from_pretrained(tmp_path / "run", vae=other)
    with pytest.raises(OptionError, match="have 8 channels"):
        ImagesPipeline.from_pretrained(tmp_path / "run", vae=wide)
    with pytest.raises(OptionError, match="another autoencoder"):
        load(recipe.changed(vae=str(other)), tmp_path, print)
    direct = recipe.changed(data=str(tmp_path / "cache"), cache=None, layout="latents")
    with pytest.raises(OptionError, match="another autoencoder"):
        load(direct.changed(vae=str(other)), tmp_path, print)
    check_recipe(direct)
    plain = load(direct.changed(vae=None), tmp_path, print)
    assert plain.autoencoder is None and plain.pictures(torch.zeros(1, 4, 4, 4)).shape == (1, 3, 4, 4)
    assert GenerationTask(direct).build(plain).channels == 4


def test_damage_to_a_cache_is_found(net, vae, tmp_path):
    load(recipe_for(net, vae, tmp_path / "cache"), tmp_path, print)
    assert check(tmp_path / "cache") == []
    shard = tmp_path / "cache" / "train-00000.npy"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert ["checksum" in problem for problem in check(tmp_path / "cache")] == [True]
    shard.write_bytes(content[:-1])
    with pytest.raises(DataError, match="another size than written"):
        Cache.read(tmp_path / "cache")
    shard.unlink()
    assert check(tmp_path / "cache") == [f"{shard}: missing"]
    (tmp_path / "cache" / "latents.json").write_text("{}")
    assert "another program" in check(tmp_path / "cache")[0]


def test_a_cache_of_other_pictures(net, vae, tmp_path):
    recipe = recipe_for(net, vae, tmp_path / "cache")
    load(recipe, tmp_path, print)
    for change in ({"image_size": 16}, {"flip": True}):
        with pytest.raises(DataError, match=f"other {next(iter(change))}"):
            load(recipe.changed(**change), tmp_path, print)
    with pytest.raises(OptionError, match="a multiple of 2"):
        load(recipe.changed(image_size=7, cache=str(tmp_path / "odd")), tmp_path, print)


def test_folders_that_are_no_autoencoder(tmp_path, vae):
    with pytest.raises(DataError, match=r"config\.json"):
        Autoencoder.load(tmp_path)
    (tmp_path / "config.json").write_text('{"_class_name": "UNet2DModel"}')
    with pytest.raises(DataError, match="a UNet2DModel"):
        Autoencoder.load(tmp_path)
    (tmp_path / "config.json").write_text((vae / "config.json").read_text())
    with pytest.raises(DataError, match="cannot be read"):
        Autoencoder.load(tmp_path)


def test_inception_means_over_the_pixels_that_are_there():
    assert torch.equal(_mean(torch.ones(1, 1, 4, 4)), torch.ones(1, 1, 4, 4))


def test_an_inception_file_is_read_before_training(tmp_path):
    (tmp_path / "other.pt").write_text("no weights")
    with pytest.raises(DataError, match="inception"):
        load(TINY.changed(inception=str(tmp_path / "other.pt")), tmp_path / "run", print)
    assert not (tmp_path / "run").exists()


def test_an_inception_file_that_is_another_network(tmp_path):
    torch.save({"weight": torch.zeros(3)}, tmp_path / "other.pt")
    with pytest.raises(DataError, match="holds no such weights") as failure:
        Inception(tmp_path / "other.pt")
    assert len(str(failure.value).splitlines()) == 1
    with pytest.raises(DataError, match="does not exist"):
        Inception(tmp_path / "none.pt")


@pytest.mark.slow
def test_fid_is_measured_with_a_file(tmp_path):
    Inception3 = torchvision("models.inception").Inception3
    torch.manual_seed(0)
    other = Inception3(num_classes=1008, aux_logits=False, transform_input=False, init_weights=False)
    torch.save(other.state_dict(), tmp_path / "inception.pt")
    network = Inception(tmp_path / "inception.pt")
    assert network(torch.zeros(2, 1, 8, 8)).shape == (2, 2048)
    with torch.no_grad():
        picture = torch.rand(1, 3, 299, 299) * 2 - 1
        other.eval().fc = torch.nn.Identity()
        assert not torch.allclose(network(picture), other(picture)), "the pooling differs"
    digits = GenerationRecipe.tiny()
    train(digits.changed(inception=str(tmp_path / "inception.pt"), control=False, samples=4, steps=1), tmp_path / "run")
    row = json.loads((tmp_path / "run" / "results.json").read_text())["rows"][0]
    assert (
        next(iter(row["metrics"])) == "fid" and row["metrics"]["fid_noise"] > 0 and row["directions"]["fid"] == "down"
    )
