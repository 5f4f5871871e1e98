"""`polymix convert` for generators: folders of polymix and of diffusers, distilled on noise alone."""

import json
import shutil
from pathlib import Path

import pytest
import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.domains.generation.flow import Flow, Sampler
from polymix.domains.generation.pipeline import ImagesPipeline, write_generator
from polymix.domains.generation.sit import SiT
from polymix.workflows.convert import noise


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(noise, "BATCHES", 4)
    monkeypatch.setattr(noise, "HELD_BACK", 1)
    torch.manual_seed(0)
    model = SiT(image_size=4, patch=1, channels=1, classes=2, dim=8, heads=2, depth=1)
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.3)
    Path("sit").mkdir()
    torch.save(model.state_dict(), "sit/model.pt")
    write_generator(Path("sit"), model, ("cat", "dog"), Flow(), Sampler(steps=2), None)
    return tmp_path


def test_a_generator_is_converted_distilled_on_noise_and_draws(run):
    status, out, err = run("--model", "sit", "--plan", "pom", "--data", "noise", "--distill-epochs", "2")
    assert (status, err) == (0, "") and "learned from the original model" in out and "Relative error, distilled" in out
    results = json.loads(Path("out/results.json").read_text())
    content = results["conversion"]["accuracy"]
    assert content["before"] == 0 and content["distilled"] < content["converted"]
    pipe = ImagesPipeline.from_pretrained("out")
    assert pipe.model.blocks[0].mixer.mixer.name == "pom"
    assert pipe(class_labels="dog", num_inference_steps=1).images[0].size == (4, 4)
    page = Path("out/report.html").read_text()
    assert "polymix compare --task generation" in page and "Relative error" in page


def test_latents_need_no_autoencoder_to_be_converted(run):
    content = json.loads(Path("sit/generator.json").read_text())
    Path("sit/generator.json").write_text(json.dumps({**content, "latents": {"vae": None, "autoencoder": "0"}}))
    assert run("--model", "sit", "--plan", "pom")[0] == 0
    assert json.loads(Path("out/generator.json").read_text())["latents"]["autoencoder"] == "0"


@pytest.mark.parametrize(
    ("options", "named"),
    [
        (("--model", "sit", "--data", "digits"), "--data noise"),
        (("--model", "sit", "--tokens", "4"), "--tokens"),
        (("--model", "sit", "--classes", "4"), "--classes"),
        (("--model", "sit", "--data", "noise", "--distill-epochs", "1", "--from-scratch"), "only the original model"),
        (("--model", "pipe"), "transformer"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(fails, options, named):
    Path("pipe").mkdir()
    Path("pipe/model_index.json").write_text("{}")
    fails(*options, named=named)


@pytest.mark.slow
def test_dit_of_diffusers(run, fails):
    cure_torchvision()
    diffusers = pytest.importorskip("diffusers", reason="untested: diffusers' hosts (the diffusion extra)")
    torch.manual_seed(0)
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, out_channels=8, num_layers=1, sample_size=8,
        patch_size=2, norm_num_groups=4, num_embeds_ada_norm=10,
    )  # fmt: skip
    for value in model.parameters():
        torch.nn.init.normal_(value, std=0.1)
    model.save_pretrained("dit")
    status, out, err = run("--model", "dit", "--plan", "pom", "--data", "noise", "--distill-epochs", "1")
    assert (status, err) == (0, "") and "Relative error, distilled" in out
    loaded = polymix.load_pretrained("out")
    call = {"hidden_states": torch.zeros(1, 4, 8, 8), "timestep": torch.tensor([3]), "class_labels": torch.tensor([1])}
    assert loaded(**call).sample.shape == (1, 8, 8, 8)
    shutil.rmtree("out")
    Path("dit/config.json").write_text('{"_class_name": "NoSuchModel"}')
    fails("--model", "dit", named="a model of diffusers")
