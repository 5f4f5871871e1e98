"""Saved models come back bit for bit, in a fresh process too."""

import json
from copy import deepcopy
from pathlib import Path

import pytest
import torch
from torch import nn

import polymix
from polymix.convert.model_recipes import decode, encode
from polymix.errors import OptionError
from tests.convert.checks import answer, stirred
from tests.convert.saving_cases import (
    CALL,
    CASES,
    PADRE,
    QT,
    encoder,
    images,
    library,
    own,
    round_trip,
    safetensors,
    said,
)
from tests.helpers import tokens

pytestmark = pytest.mark.slow  # real hosts by the dozen: minutes together


@pytest.mark.parametrize("name", CASES)
def test_a_fresh_process_gives_the_same_bits(saved, name):
    folders, same, _ = saved
    if name not in folders:
        pytest.skip(f"untested: {name}, whose library is not installed")
    assert same[name], "another output, or not in evaluation"
    assert sorted(path.name for path in Path(folders[name]).iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("name", CASES)
def test_what_is_loaded_is_the_same_model_and_saves_again(saved, name, tmp_path):
    """State dict, plan, tied weights, dtypes; without `host`, which it remembers."""
    folder = saved[0].get(name)
    if folder is None:
        pytest.skip(f"untested: {name}, whose library is not installed")
    model = polymix.load_pretrained(folder, trust=CASES[name].host is not None)
    polymix.save_pretrained(deepcopy(model), tmp_path)
    again = polymix.load_pretrained(tmp_path, trust=CASES[name].host is not None)
    before, after = said(folder), said(tmp_path)
    assert {**before, "host": 0} == {**after, "host": 0}
    ours, theirs = again.state_dict(keep_vars=True), model.state_dict(keep_vars=True)
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == theirs[key].dtype for key in ours)
    assert len({id(p) for p in ours.values()}) == len({id(p) for p in theirs.values()}), "tied weights came apart"
    assert all(ours[key].requires_grad == theirs[key].requires_grad for key in ours)


def test_config_json_is_what_the_weights_say(tmp_path):
    model = polymix.convert(own(), PADRE).model
    polymix.save_pretrained(model, tmp_path, metadata={"accuracy": 0.97, "data": ["digits"]})
    with safetensors.safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        header = json.loads(file.metadata()["polymix"])
    assert header == said(tmp_path)
    assert header["metadata"] == {"accuracy": 0.97, "data": ["digits"]}
    layer = header["layers"]["blocks.0.mixer"]["mixer"]
    assert layer["name"] == "padre" and layer["degree"] == 3 and layer["grid"] == [4, 4]
    (tmp_path / "config.json").unlink()
    assert polymix.load_pretrained(tmp_path), "the copy is for people: loading does not need it"


def test_saving_and_loading_leave_model_and_random_numbers_alone(tmp_path):
    model = polymix.convert(own(), "1:1").model.train()
    state = torch.get_rng_state()
    bits = {key: value.clone() for key, value in model.state_dict().items()}
    loaded = round_trip(model, tmp_path)
    assert torch.equal(torch.get_rng_state(), state), "a run that saves would go on with other random numbers"
    assert model.training and all(torch.equal(bits[key], value) for key, value in model.state_dict().items())
    assert not loaded.training


def test_after_training_and_on_a_model_converted_twice(tmp_path):
    model = own()
    polymix.convert(model, {"blocks.0.mixer": PADRE})
    report = polymix.convert(model, {"blocks.1.mixer": QT})
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(images()).square().sum().backward()
    optimizer.step()
    loaded = round_trip(report.model, tmp_path)
    assert [layer["mixer"]["name"] for layer in said(tmp_path)["layers"].values()] == ["padre", "qt"]
    assert torch.equal(answer(loaded, images())[0], answer(model, images())[0])


def test_inserted_mixers(tmp_path):
    """Beside converted layers, before and after modules, with weights that were trained."""
    model = own()
    polymix.convert(model, "1:1", mixer=PADRE)
    polymix.insert(model, "embed", "poly_nl", where="after", input=images())
    polymix.insert(model, "blocks.1", polymix.PadreConfig(degree=2, kernel_size=3), input=images())
    polymix.insert(model, "blocks.0.mixer", "pom", input=images())
    model = stirred(model).eval()
    loaded = round_trip(model, tmp_path)
    assert len(said(tmp_path)["layers"]) == 4
    assert torch.equal(answer(loaded, images())[0], answer(model, images())[0])
    assert not torch.equal(answer(loaded, images())[0], answer(own(), images())[0])


def test_windows_that_were_merged(tmp_path):
    model = library("timm").create_model(
        "swin_tiny_patch4_window7_224", img_size=16, patch_size=2, window_size=4, embed_dim=8, depths=(2, 1),
        num_heads=(2, 2), num_classes=3,
    )  # fmt: skip
    for windows in ("keep", "merge"):
        options = {"windows": windows, "input": images(16), "drop": ("position_bias",)}
        report = polymix.convert(stirred(model), "padre" if windows == "merge" else "pom", copy=True, **options)
        loaded = round_trip(report.model.eval(), tmp_path)
        assert torch.equal(answer(loaded, images(16))[0], answer(report.model, images(16))[0])


def test_a_model_that_is_itself_the_layer(tmp_path):
    report = polymix.convert(nn.MultiheadAttention(16, 2, batch_first=True), "pom")
    x = tokens(2, 5, 16, dtype=torch.float32)
    host = {"library": "torch", "class": "torch.nn.MultiheadAttention",
            "kwargs": {"embed_dim": 16, "num_heads": 2, "batch_first": True}}  # fmt: skip
    loaded = round_trip(report.model, tmp_path, host=host)
    assert torch.equal(loaded(x, x, x)[0], report.model.eval()(x, x, x)[0])
    assert round_trip(loaded, tmp_path / "again"), "it forgot how its host is built"


def pair(tied=False):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[1].weight = model[0].weight if tied else model[1].weight
    return model


@pytest.mark.parametrize("tied", [True, False])
def test_ties_are_those_of_the_model_not_of_the_host(tmp_path, tied):
    """A host that ties two weights, in a model where they were taken apart, and the other way round."""
    model = pair(tied)
    loaded = round_trip(
        model, tmp_path, host={"call": "tests.convert.test_save:pair", "kwargs": {"tied": not tied}}, trust=True
    )
    assert (loaded[0].weight is loaded[1].weight) == tied
    assert all(torch.equal(a, b) for a, b in zip(loaded.parameters(), model.parameters(), strict=True))


def test_a_module_in_two_places_that_the_host_has_twice(tmp_path):
    """One of the two would get the other's weights."""
    model = encoder(tied=True)
    model[2] = deepcopy(model[1])
    with pytest.raises(OptionError, match=r"2 is one with '1' instead of one with '2'"):
        polymix.save_pretrained(model, tmp_path, host=CALL)


class Odd(nn.Module):
    """Buffers that are not saved with the weights: one that building gives again, one that it does not; views; scalars."""

    def __init__(self, seed=None):
        super().__init__()
        self.register_buffer("mask", torch.ones(4, 4).tril(), persistent=False)
        self.register_buffer("noise", torch.randn(4), persistent=False)
        self.register_buffer("count", torch.tensor(3))
        self.weight = nn.Parameter(torch.zeros(4, 4), requires_grad=False)
        self.act, self.scale, self.sizes = torch.relu, 1.0, (4, 4)

    def forward(self, x):
        return self.act(x @ self.weight @ self.mask * self.scale + self.noise) + self.count


def test_what_building_does_not_give_again_is_saved(tmp_path):
    model, x = Odd(), tokens(2, 4, dtype=torch.float32)
    model.weight = nn.Parameter(torch.arange(32.0).reshape(4, 8)[:, ::2], requires_grad=False)  # not contiguous
    model.scale, model.sizes = 0.5, (2, (1, None))
    loaded = round_trip(model, tmp_path, host={"call": "tests.convert.test_save:Odd"}, trust=True)
    assert said(tmp_path)["buffers"] == ["noise"], "the mask is built again; the noise is not"
    assert torch.equal(loaded(x), model(x))
    assert (loaded.scale, loaded.sizes, loaded.weight.requires_grad) == (0.5, (2, (1, None)), False)
    assert "noise" not in loaded.state_dict(), "what the host keeps out of its state dict stays out"
    model.act = torch.tanh
    with pytest.raises(OptionError, match=r"act is .*relu instead of .*tanh"):
        polymix.save_pretrained(model, tmp_path, host={"call": "tests.convert.test_save:Odd"})


def test_device_and_dtype(tmp_path):
    model = own().double()
    polymix.save_pretrained(model, tmp_path)
    assert polymix.load_pretrained(tmp_path).position.dtype == torch.float64
    loaded = polymix.load_pretrained(tmp_path, dtype=torch.bfloat16, device="cpu")
    assert {p.dtype for p in loaded.parameters()} == {torch.bfloat16}
    assert polymix.load_pretrained(tmp_path, device="meta").position.is_meta
    if torch.cuda.is_available():
        assert polymix.load_pretrained(tmp_path, device="cuda").position.is_cuda


@pytest.mark.parametrize(
    "value", [None, True, 3, 0.1, float("inf"), "a", (1, (2, None)), [1, (2,)], {"a": (1,)}, PADRE]
)
def test_plain_values_survive_json(value):
    back = decode(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert repr(back) == repr(value)


def test_what_the_caller_has_set_plays_no_part(saved, tmp_path):
    """A default dtype or device of the process that saves or loads."""
    case = "GPT-2, tied weights" if "GPT-2, tied weights" in saved[0] else "own"
    arrays = torch.load(saved[0][case] + ".pt")
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            polymix.save_pretrained(polymix.load_pretrained(saved[0][case]), tmp_path)
            model = polymix.load_pretrained(tmp_path)
        answers = answer(model, arrays["input"])[0]
    finally:
        torch.set_default_dtype(torch.float32)
    assert answers.dtype == torch.float32
    torch.testing.assert_close(answers, arrays["output"])
