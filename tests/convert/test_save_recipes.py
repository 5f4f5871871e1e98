"""How a saved model's host is built again: by its library, or by user code that must be trusted; nothing is downloaded."""

import pytest
import torch
from torch import nn

import polymix
from polymix.errors import OptionError
from tests.convert.checks import answer
from tests.convert.saving_cases import (
    ENCODER,
    bert,
    encoder,
    images,
    library,
    own,
    rewrite,
    round_trip,
    said,
    text,
    timm_vit,
    words,
)
from tests.helpers import tokens

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together


def test_timm_models_tell_what_they_were_called_with(tmp_path):
    """Also after a new head, and without what newer timm keeps of the call."""
    model = timm_vit(drop_path_rate=0.2, global_pool="avg", in_chans=4)
    model.reset_classifier(5)
    loaded = round_trip(model, tmp_path)
    assert repr(loaded) == repr(model)
    model.pretrained_cfg = {**model.pretrained_cfg, "mean": (0.1, 0.2, 0.3)}
    assert round_trip(model, tmp_path).pretrained_cfg["mean"] == (0.1, 0.2, 0.3), "images would be normalised otherwise"
    model = library("timm").create_model("test_vit", num_classes=7, img_size=32, drop_rate=0.2, drop_path_rate=0.1)
    vars(model).pop("_model_args", None)
    assert repr(round_trip(model, tmp_path)) == repr(model)
    model = timm_vit()
    vars(model).pop("_model_args", None)
    with pytest.raises(OptionError, match=r"instead of.*\"library\": \"timm\".*\"name\""):
        polymix.save_pretrained(model, tmp_path)


def test_a_classifier_that_timm_does_not_find_is_no_mistake(monkeypatch, tmp_path):
    """As in CLIP's ResNets, whose attention is both pooling and head: `get_classifier` fails."""
    model = timm_vit()
    monkeypatch.setattr(type(model), "get_classifier", lambda self: self.head.fc)
    assert repr(round_trip(model, tmp_path)) == repr(model)


def test_torchvision_models_are_found_by_what_their_builders_build(tmp_path):
    model = library("torchvision.models").get_model("mobilenet_v3_small", weights=None, num_classes=3)
    loaded = round_trip(model, tmp_path)
    assert said(tmp_path)["host"]["name"] == "mobilenet_v3_small"
    assert torch.equal(answer(loaded, images(32))[0], answer(model, images(32))[0])


def test_transformers_keep_their_attention_and_generation(saved):
    if "GPT-2, tied weights" not in saved[0]:
        pytest.skip("untested: transformers is not installed")
    model = polymix.load_pretrained(saved[0]["GPT-2, tied weights"])
    assert model.lm_head.weight is model.transformer.wte.weight
    assert model.config._attn_implementation == "eager", "another kernel gives other bits"
    assert model.generation_config.eos_token_id == 1


def test_transformers_in_bfloat16_keep_their_angles(tmp_path):
    """Rotary angles are no part of the state dict; rebuilt in float32 they would give other outputs."""
    transformers = library("transformers")
    model = transformers.LlamaForCausalLM(text("Llama")).bfloat16()
    loaded = round_trip(model, tmp_path)
    assert torch.equal(answer(loaded, words())[0], answer(model, words())[0])


def test_diffusers_models_are_built_by_their_config(tmp_path):
    diffusers = library("diffusers")
    model = diffusers.DiTTransformer2DModel(
        num_attention_heads=2, attention_head_dim=8, in_channels=4, num_layers=1, sample_size=4, norm_num_groups=4
    )
    given = {
        "hidden_states": tokens(1, 4, 4, 4, dtype=torch.float32),
        "timestep": torch.tensor([1]),
        "class_labels": torch.tensor([1]),
    }
    assert torch.equal(answer(round_trip(model, tmp_path), given)[0], answer(model, given)[0])


def test_a_file_beside_is_found_wherever_both_go(tmp_path):
    (tmp_path / "code").mkdir()
    file = tmp_path / "code" / "host.py"
    file.write_text("from torch import nn\n\n\ndef build(dim):\n    return nn.Sequential(nn.Linear(dim, dim))\n")
    model = nn.Sequential(nn.Linear(4, 4))
    polymix.save_pretrained(model, tmp_path / "model", host={"call": f"{file}:build", "kwargs": {"dim": 4}})
    assert said(tmp_path / "model")["host"]["call"] == "../code/host.py:build"
    tmp_path.rename(tmp_path.with_name("moved"))
    moved = tmp_path.with_name("moved")
    loaded = polymix.load_pretrained(moved / "model", trust=True)
    assert torch.equal(loaded[0].weight, model[0].weight)
    polymix.save_pretrained(loaded, moved)
    assert said(moved)["host"]["call"] == "code/host.py:build", "the way is from the new folder"
    file = moved / "code" / "host.py"
    file.write_text(
        file.read_text()
        .replace("nn.Sequential(nn.Linear(dim, dim))", "nn.Sequential(nn.Linear(4, 4)), 'input'")
        .replace("dim", "")
    )
    polymix.save_pretrained(loaded, moved, host=f"{file}:build")
    assert torch.equal(polymix.load_pretrained(moved, trust=True)[0].weight, model[0].weight)
    file.unlink()
    with pytest.raises(OptionError, match=r"host\.py does not exist.*Put it there"):
        polymix.load_pretrained(moved / "model", trust=True)


def test_code_of_others_does_not_run_unasked(tmp_path):
    file = tmp_path / "host.py"
    file.write_text(
        "from pathlib import Path\nfrom torch import nn\n\n\ndef build():\n    Path(__file__).with_name('ran').touch()\n    return nn.Linear(2, 2)\n"
    )
    polymix.save_pretrained(nn.Linear(2, 2), tmp_path, host={"call": f"{file}:build"})
    (tmp_path / "ran").unlink()
    with pytest.raises(OptionError, match=r"trust.*host\.py:build.*trust=True"):
        polymix.load_pretrained(tmp_path)
    assert not (tmp_path / "ran").exists(), "the file was run without trust"
    polymix.load_pretrained(tmp_path, trust=True)
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize("host", [
    {"library": "torch", "class": "torch.hub.load", "kwargs": {}}, {"library": "torch", "class": "torch.nn.init.os"},
    {"library": "os", "class": "os.system", "kwargs": {}}, {"library": "polymix", "class": "polymix.models.vit.torch"},
    {"library": "polymix", "class": "subprocess.Popen", "kwargs": {}}, {"library": "torch", "class": "torch.nn.functional.relu"},
])  # fmt: skip
def test_nothing_but_models_of_known_libraries_is_built_without_trust(tmp_path, host):
    polymix.save_pretrained(own(), tmp_path)
    rewrite(tmp_path, lambda content, _: content.update(host=host))
    with pytest.raises(OptionError, match="host"):
        polymix.load_pretrained(tmp_path)


def test_nothing_is_fetched_for_a_host(tmp_path):
    library("timm")
    polymix.save_pretrained(own(), tmp_path)
    for kwargs, name in (
        ({}, "hf-hub:some/model"),
        ({"checkpoint_path": "x.pt"}, "test_vit"),
        ({"pretrained": True}, "test_vit"),
    ):
        host = {"library": "timm", "name": name, "kwargs": kwargs}
        rewrite(tmp_path, lambda content, _, host=host: content.update(host=host))
        with pytest.raises(OptionError, match=r"timm lists|multiple values"):
            polymix.load_pretrained(tmp_path)


def test_no_attention_is_fetched_for_a_host(tmp_path):
    library("transformers")
    polymix.save_pretrained(bert(), tmp_path)
    for change in (
        {"attention": "some/kernel"},
        {"config": {"attn_implementation": "some/kernel"}},
        {"attention": {"": "a/b"}},
    ):
        rewrite(tmp_path, lambda content, _, change=change: content["host"].update(change))
        with pytest.raises(OptionError, match="downloads nothing"):
            polymix.load_pretrained(tmp_path)


@pytest.mark.parametrize(("host", "words"), [
    ("timm", ["timm", "file.py:function"]), ({"library": "keras", "name": "a"}, ["keras", "torchvision"]),
    ({"library": "timm"}, ["name"]), ({"call": 3}, ["3"]), ({"call": "a:b", "extra": 1}, ["extra"]),
    ({"call": ENCODER, "kwargs": {"dim": torch.ones(1)}}, ["numbers, strings"]),
    ({"call": ENCODER, "kwargs": {"width": 3}}, ["TypeError", "width"]), ({"call": "tests.none:f"}, ["No module"]),
    ({"call": ENCODER, "kwargs": {"dim": 8}}, ["(24, 8) instead of (48, 16)"]), ({"call": "json:dumps", "kwargs": {"obj": 1}}, ["str"]),
    ({"call": ENCODER, "kwargs": {"depth": 3}}, ["missing", "2"]), (None, ["Sequential", "host"]),
])  # fmt: skip
def test_recipes_that_are_none(tmp_path, host, words):
    with pytest.raises(OptionError) as error:
        polymix.save_pretrained(encoder(), tmp_path / "new", host=host)
    assert all(word in str(error.value) for word in words), str(error.value)
    assert not (tmp_path / "new").exists(), "nothing is written for a model that would not come back"
