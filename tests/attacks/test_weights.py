"""Folders whose weights are not whole: nothing measures, uses or writes a model that is partly random numbers."""

import logging
import shutil

import pytest
import torch
from PIL import Image

from polymix.errors import PolymixError, ResultsError
from tests.attacks.command import TEXT, run

pytest.importorskip("transformers", reason="untested: language models, for which transformers is needed")
safetensors = pytest.importorskip("safetensors.torch", reason="untested: files of safetensors")


def of_llama(folder):
    """A language model that transformers itself knows."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(vocab_size=300, hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8,
                         max_position_embeddings=32)  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)


def of_autoencoder(folder):
    pytest.importorskip("diffusers", reason="untested: models of diffusers")
    from tests.domains.generation.test_latents import autoencoder

    autoencoder(folder)


def of_transformer(folder):
    diffusers = pytest.importorskip("diffusers", reason="untested: models of diffusers")
    diffusers.DiTTransformer2DModel(num_attention_heads=2, attention_head_dim=4, in_channels=2, num_layers=1, sample_size=4,
                                    patch_size=2, num_embeds_ada_norm=8).save_pretrained(folder)  # fmt: skip


def of_vit(folder):
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=8, num_attention_heads=2, num_hidden_layers=1, intermediate_size=8, image_size=8, patch_size=4
    )
    ViTForImageClassification(config).save_pretrained(folder)


def of_timm(folder):
    timm = pytest.importorskip("timm", reason="untested: models of timm")
    timm.models.save_for_hf(timm.create_model("test_vit", img_size=32, num_classes=3), folder, safe_serialization=True)


def generate(folder):
    from polymix.workflows.generate.folder import load

    return load(folder)


def convert(folder):
    from polymix.workflows.convert.sources import load_model

    return load_model(str(folder))


def export(folder):
    from polymix.export.language import load_language_model

    return load_language_model(folder)


def restore(folder):
    from polymix.domains.text.recipe import TextRecipe
    from polymix.domains.text.task import TextTask

    return TextTask(TextRecipe()).restore(None, folder)


def decode(folder):
    from polymix.domains.generation.latents import Autoencoder

    return Autoencoder.load(folder)


# Who reads a folder of weights with a library's from_pretrained, and a model for it; None: the material's own.
READERS = {
    "generate": (generate, None), "evaluate a run": (restore, None), "export": (export, None), "convert text": (convert, of_llama), "convert timm": (convert, of_timm),
    "generate llama": (generate, of_llama), "convert images": (convert, of_vit), "convert a generator": (convert, of_transformer),
    "decode latents": (decode, of_autoencoder),
}  # fmt: skip


def damages(weights):
    """What is wrong: the tensors of the file instead, and a tensor that the message names."""
    first, *_, last = sorted(weights)
    yield "no tensor", {}, first
    yield "a foreign tensor", {"foreign": torch.zeros(3)}, first
    yield "embeddings and norms only", {k: v for k, v in weights.items() if "norm" in k or "embed" in k}, None
    yield "one lost", {k: v for k, v in weights.items() if k != last}, last
    yield "one of another shape", {**weights, last: torch.zeros(3)}, last
    yield "the names of another prefix", {f"other.{k}": v for k, v in weights.items()}, first


@pytest.mark.parametrize("reader", READERS)
def test_weights_that_are_not_whole_are_refused_by_name(material, tmp_path, reader):
    """A library fills what is missing with random numbers and goes on; the numbers would be taken for the model's."""
    read, build = READERS[reader]
    folder = tmp_path / "model"
    shutil.copytree(material / "lm", folder)
    if build is not None:
        for name in ("config.json", "model.safetensors", "generation_config.json"):
            (folder / name).unlink(missing_ok=True)
        build(folder)
    (file,) = folder.glob("*.safetensors")
    read(folder)
    weights = safetensors.load_file(file)
    for what, tensors, name in damages(weights):
        safetensors.save_file(tensors, file, metadata={"format": "pt"})
        with pytest.raises(PolymixError if build is of_timm else ResultsError) as info:
            read(folder)
        assert str(folder) in str(info.value), what
        assert name is None or build is of_timm or name in str(info.value) or "more" in str(info.value), (
            what,
            info.value,
        )
        assert build is of_timm or any(key in str(info.value) for key in weights), (
            what,
            "a tensor is named",
            info.value,
        )


@pytest.mark.parametrize("arguments", [
    ["generate", "lm", "--prompt", "a"], ["evaluate", "lm", "--data", "text.txt"], ["export", "--model", "lm", "--out", "out"],
])  # fmt: skip
def test_no_command_uses_a_language_model_without_its_weights(material, tmp_path, monkeypatch, arguments):
    shutil.copytree(material / "lm", tmp_path / "lm")
    (tmp_path / "text.txt").write_text(TEXT)
    monkeypatch.chdir(tmp_path)
    library, said = logging.getLogger("transformers"), list[logging.LogRecord]()
    handler = logging.Handler()
    monkeypatch.setattr(handler, "emit", said.append)
    monkeypatch.setattr(library, "handlers", [handler])
    file = tmp_path / "lm" / "model.safetensors"
    weights = {key: value for key, value in safetensors.load_file(file).items() if "norm" in key or "embed" in key}
    for tensors in (weights, {}, {"foreign": torch.zeros(1)}):
        safetensors.save_file(tensors, file, metadata={"format": "pt"})
        outcome = run(arguments, work=())
        assert outcome.refused, outcome
        assert "lack" in outcome.err, outcome.err
        assert not said, "transformers' table of these tensors stood above the line"
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("build", [of_vit, of_timm])
@pytest.mark.parametrize("verb", ["evaluate", "export"])
def test_a_folder_without_weights_is_no_trained_model(tmp_path, monkeypatch, build, verb):
    """Only `convert` takes an architecture alone, and says so."""
    monkeypatch.chdir(tmp_path)
    build(tmp_path / "model")
    for file in (tmp_path / "model").glob("*.safetensors"):
        file.unlink()
    for name in ("a", "b"):
        (tmp_path / "images" / name).mkdir(parents=True)
        for i in range(4):
            Image.new("RGB", (8, 8)).save(tmp_path / "images" / name / f"{i}.png")
    rest = ["model", "--data", "images"] if verb == "evaluate" else ["--model", "model", "--out", "out"]
    outcome = run([verb, *rest], work=())
    assert outcome.refused, outcome
    assert "no weights" in outcome.err, outcome.err
