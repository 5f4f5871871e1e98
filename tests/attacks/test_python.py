"""Bad arguments of the Python API: every public callable, each argument with each bad value.

The law for each row: a PolymixError that names the argument, in one line and before anything is changed, or a right
result. Never another error.
"""

import math
import resource
import socket
from dataclasses import fields
from unittest.mock import patch

import pytest
import torch
from torch import nn

import polymix
from polymix import lens
from polymix.errors import PolymixError
from polymix.limits import memory_of
from polymix.mixers.registry import config_class
from polymix.models import VisionTransformer
from polymix.train.registry import OWN_RECIPES, recipe_class
from polymix.train.run import check_recipe
from tests.attacks.command import _no_socket

BAD = {
    "None": None, "True": True, "-1": -1, "0": 0, "1.5": 1.5, "nan": math.nan, "inf": math.inf, "-inf": -math.inf, "2**70": 2**70,
    "10**9": 10**9, "10**12": 10**12, "text": "x", "empty": "", "name": "pom", "number as text": "3", "list": [], "tuple": (), "dict": {},
    "ones": [1], "pair": (3, 4), "mixed": (1, "x"), "bytes": b"x", "object": object(), "type": int, "function": abs,
    "tensor": torch.ones(2), "complex": 1j, "set": {1}, "huge pair": (10**6, 10**6), "nested": [[1, 2], [3]],
}  # fmt: skip
# Importing transformers and timm, or building these again and again, takes seconds.
EFFORT = {"hyena": pytest.mark.exhaustive, **dict.fromkeys(("mamba", "castling", "gc"), pytest.mark.slow)}
MIXERS = [pytest.param(name, marks=EFFORT.get(name, ())) for name in polymix.list_mixers()]
X = torch.randn(2, 12, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def small_machine(monkeypatch):
    """A machine with 256 MiB: nothing larger is built, however much this one has."""
    monkeypatch.setattr("polymix.limits.memory_of", lambda device="cpu": 2**28)


def fails(call, rows, label, right=lambda result: True):
    """Note a row whose outcome is neither an error of ours in one line nor a right result."""
    try:
        result = call()
    except PolymixError as error:
        if "\n" in str(error) or not error.argument or len(str(error)) > 1500:
            rows.append((label, f"a message that is no line: {error}"))
    except Exception as error:
        rows.append((label, f"{type(error).__name__}: {str(error)[:150]}"))
    else:
        try:
            fine = right(result)
        except Exception as error:
            fine, result = False, f"{type(error).__name__}: {str(error)[:150]}"
        if not fine:
            rows.append((label, f"accepted: {type(result).__name__} {result if isinstance(result, str) else ''}"))


def works(mixer):
    """A mixer that was built can be called."""
    grid = mixer.config.call_options((3, 4))
    context = (X,) * (mixer.contexts) if mixer.needs_context else ()
    with torch.no_grad():
        return mixer(X, *context, **grid).shape == X.shape


def most_memory():
    """The most memory that this process has held, in KiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def buildable(name):
    """Options with which a mixer can be built for 12 tokens."""
    for options in ({}, {"grid": (3, 4)}):
        try:
            polymix.create_mixer(name, 8, **options)
        except PolymixError:
            continue
        return options
    raise AssertionError(name)


@pytest.mark.parametrize("name", MIXERS)
def test_every_option_of_every_mixer_with_every_value(small_machine, name):
    rows, options, before = [], buildable(name), most_memory()
    for option in fields(config_class(name)):
        for label, value in BAD.items():

            def build(option=option.name, value=value):
                return polymix.create_mixer(name, 8, **{**options, option: value})

            def called(mixer, value=value):
                try:
                    return works(mixer)
                except PolymixError:  # built for another grid, or for a context
                    return True

            fails(build, rows, f"{option.name}={label}", called)
    assert not rows
    assert most_memory() - before < 2**20, "a refused option filled more than 1 GiB"


@pytest.mark.parametrize("name", MIXERS)
def test_arguments_of_create_mixer_and_its_methods(small_machine, name):
    rows, options = [], buildable(name)
    mixer = polymix.create_mixer(name, 8, **options)
    size = sum(p.numel() for p in mixer.parameters())
    for label, value in BAD.items():
        fails(lambda v=value: polymix.create_mixer(name, v, **options), rows, f"dim={label}")
        for argument in ("device", "dtype"):
            fails(lambda a=argument, v=value: polymix.create_mixer(name, 8, **options, **{a: v}), rows, f"{argument}={label}",
                  lambda mixer, v=value: v is None or not isinstance(v, (int, float)) or isinstance(v, bool))  # fmt: skip
        for method in ("cost", "matrices"):
            fails(lambda m=method, v=value: getattr(mixer, m)(v), rows, f"{method}(n={label})")
            fails(lambda m=method, v=value: getattr(mixer, m)(12, grid=v), rows, f"{method}(grid={label})")
        for argument in ("context", "mask", "causal", "grid", "segments"):
            fails(lambda a=argument, v=value: mixer(X, **{a: v}), rows, f"{argument}={label}",
                  lambda y: y.shape == X.shape)  # fmt: skip
        fails(lambda v=value: mixer(v), rows, f"x={label}")
        fails(lambda v=value: mixer.prefill(v), rows, f"prefill({label})")
        fails(lambda v=value: mixer.step(v), rows, f"step({label})")
        fails(lambda v=value: mixer.step(X[:, 0], v), rows, f"step(x, {label})")
        fails(lambda v=value: polymix.explain(mixer, v), rows, f"explain(x={label})")
    assert sum(p.numel() for p in mixer.parameters()) == size
    assert not rows


def host():
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1, enable_nested_tensor=False)


def functions(folder):
    """Name: (function, arguments that are right). One argument at a time becomes a bad value."""
    polymix.save_pretrained(small_model(), folder / "s")
    module = polymix.create_mixer("pom", 4, activation="identity", gate="identity")
    small = {"shape": (1, 4, 4)}
    return {
        "convert": (lambda **kw: polymix.convert(kw.pop("model", None), kw.pop("plan", "pom"), **kw),
                    {"model": host(), "plan": "pom", "mixer": "padre", "input": X, "init": "inherit", "copy": True, "grid": (3, 4),
                     "causal": None, "windows": "keep"}),
        "insert": (polymix.insert, {"model": host(), "at": "layers.0", "mixer": "pom", "input": X}),
        "load_pretrained": (polymix.load_pretrained, {"folder": folder / "s", "device": "cpu", "dtype": None, "trust": False}),
        "save_pretrained": (polymix.save_pretrained, {"model": VisionTransformer(polymix.PomConfig(), image_size=8, patch_size=4, dim=8,
                            depth=1, classes=2), "folder": folder / "t", "host": None, "metadata": None}),
        "MixerBlock": (polymix.MixerBlock, {"dim": 8, "mixer": polymix.PomConfig(), "mlp_ratio": 4.0, "norm": "layer", "dropout": 0.0,
                       "device": None, "dtype": None}),
        "PolyMorpher": (polymix.PolyMorpher, {"dim": 8, "mlp_ratio": 4.0, "norm": "layer", "dropout": 0.0, "device": None, "dtype": None,
                        "degree": 2, "expand": 2}),
        "VisionTransformer": (VisionTransformer, {"mixer": polymix.PomConfig(), "image_size": 8, "patch_size": 4, "dim": 8, "depth": 1,
                              "classes": 2, "channels": 3, "mlp_ratio": 4.0, "class_token": False, "device": None, "dtype": None}),
        "create_mixer": (polymix.create_mixer, {"name": "pom", "dim": 8}),
        "explain": (polymix.explain, {"model": module, "x": torch.ones(1, 4, 4)}),
        "recommend": (_recommend, {"model_or_shapes": (16, 8), "device": "cpu", "dtype": "float32", "candidates": ("pom",), "batch": 1,
                      "input": None, "training": False, "seconds": 0.01, "threads": 1}),
        "lens.degree": (lens.degree, {"module": module, "x": None, "seed": 0, **small}),
        "lens.interactions": (lens.interactions, {"module": module, "order": 2, "seed": 0, **small}),
        "lens.tensor": (lens.tensor, {"module": module, "order": 2, "tokens": None, "seed": 0, **small}),
        "lens.receptive_field": (lens.receptive_field, {"module": module, "seed": 0, **small}),
        "lens.equivariance": (lens.equivariance, {"module": module, "seed": 0, **small}),
        "lens.contextual_mapping": (lens.contextual_mapping, {"module": module, "seed": 0, **small}),
        "lens.overview": (lens.overview, {"module": module, "order": 2, "seed": 0, **small}),
        "lens.as_padre": (lens.as_padre, {"mixer": module, "n": 4}),
    }  # fmt: skip


def _recommend(**arguments):
    with patch("polymix.workflows.recommend.run._advise", lambda *args: []):
        return polymix.recommend(arguments.pop("model_or_shapes"), **arguments)


NAMES = ("convert", "insert", "load_pretrained", "save_pretrained", "MixerBlock", "PolyMorpher", "VisionTransformer",
         "create_mixer", "explain", "recommend", "lens.degree", "lens.interactions", "lens.receptive_field",
         "lens.tensor", "lens.equivariance", "lens.contextual_mapping", "lens.overview", "lens.as_padre")  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_every_argument_of_every_function_with_every_value(small_machine, name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(socket.socket, "connect", _no_socket)
    function, arguments = functions(tmp_path)[name]
    function(**dict(arguments))
    rows = []
    for argument in arguments:
        for label, value in BAD.items():
            fails(lambda a=argument, v=value: function(**{**arguments, a: v}), rows, f"{argument}={label}")
    assert not rows


@pytest.mark.parametrize("domain", OWN_RECIPES)
def test_every_option_of_every_recipe_with_every_value(domain):
    recipe, rows = recipe_class(domain), []
    for option in recipe.model_fields:
        for label, value in BAD.items():
            fails(lambda o=option, v=value: recipe(**{o: v}).to_dict(), rows, f"{option}={label}")
        if "str" in str(recipe.model_fields[option].annotation):  # names and paths, which the task looks at
            for label in ("number as text", "text", "empty", "list", "nested", "1.5"):
                fails(lambda o=option, v=BAD[label]: check_recipe(recipe(**{o: v})), rows, f"task: {option}={label}")
    assert not rows


def language_model():
    from polymix.models.language import PolymixGPTConfig, PolymixGPTForCausalLM

    sizes = {"vocab_size": 11, "hidden_size": 8, "num_heads": 2, "num_layers": 1, "max_position_embeddings": 16}
    return PolymixGPTForCausalLM(PolymixGPTConfig(**sizes))


IDS = torch.arange(10).view(2, 5)


@pytest.mark.parametrize(("arguments", "words"), [
    ({"input_ids": IDS + 5}, ["input_ids", "id 14", "0 to 10"]), ({"input_ids": IDS - 1}, ["input_ids", "id -1", "0 to 10"]),
    ({"input_ids": IDS.float()}, ["input_ids", "float32", "int64"]), ({"input_ids": IDS[0]}, ["input_ids", "(5,)", "(B, N)"]),
    ({"input_ids": IDS.bool()}, ["input_ids", "bool"]), ({"input_ids": [[1, 2]]}, ["input_ids", "list"]),
    ({"inputs_embeds": torch.ones(2, 5, 7)}, ["inputs_embeds", "(2, 5, 7)", "(B, N, 8)"]),
    ({"input_ids": IDS, "labels": IDS[:, 1:]}, ["labels", "(2, 4)", "(2, 5)"]),
    ({"input_ids": IDS, "labels": IDS + 5}, ["labels", "label 11", "0 to 10", "-100"]),
    ({"input_ids": IDS, "labels": IDS - 7}, ["labels", "label -7"]), ({"input_ids": IDS, "labels": IDS.float()}, ["labels", "float32"]),
    ({"input_ids": IDS, "labels": 3}, ["labels", "int"]),
])  # fmt: skip
def test_language_models_check_their_ids_and_labels(arguments, words):
    with pytest.raises(PolymixError) as info:
        language_model()(**arguments)
    assert all(word in str(info.value) for word in words), info.value


def test_language_models_take_labels_that_do_not_count():
    labels = IDS.masked_fill(IDS % 2 == 0, -100)
    assert language_model()(input_ids=IDS, labels=labels).loss.isfinite()


@pytest.mark.parametrize("label", [7, -1, 10**6])
def test_distillation_checks_its_labels(label):
    model = nn.Sequential(host(), nn.Flatten(), nn.Linear(96, 3))
    report = polymix.convert(model, "pom")
    labels = torch.tensor([0, label])
    with pytest.raises(PolymixError, match=f"label {label} for 3 classes"):
        polymix.distill(report, [(X, labels)], epochs=1, imitate_epochs=0)


@pytest.mark.parametrize(("given", "words"), [
    (None, ["model", "NoneType"]), ("x", ["input", "str"]), ([], ["input", "list"]), (X[..., :5], ["(B, N, 8)", "(2, 12, 5)"]),
    (X.double(), ["float32", "float64"]), ({"nope": X}, ["nope", "dict"]), ((X, X, X, X, X, X), ["tuple"]),
])  # fmt: skip
def test_convert_says_which_input_the_model_takes(given, words):
    with pytest.raises(PolymixError) as info:
        polymix.convert(*((None, "pom") if given is None else (host(), "pom")), input=given)
    assert all(word in str(info.value) for word in words), info.value


@pytest.mark.parametrize("device", ["cuda:7", "mps:7", "xpu:7", "hpu", "gpu", -1])
def test_a_device_that_this_machine_lacks(device):
    """Whatever PyTorch was built for: what it raises by itself differs between builds, and is no error of ours."""
    for build in (polymix.PomConfig().build, polymix.PolyMorpher):
        with pytest.raises(PolymixError, match="`device`"):
            build(dim=8, device=device)


def test_load_pretrained_takes_the_name_of_a_type(tmp_path):
    polymix.save_pretrained(small_model(), tmp_path / "m")
    assert polymix.load_pretrained(tmp_path / "m", dtype="bfloat16").head.weight.dtype == torch.bfloat16
    for options, word in (({"device": "gpu"}, "gpu"), ({"dtype": "int8"}, "int8"), ({"trust": 1}, "trust")):
        with pytest.raises(PolymixError, match=word):
            polymix.load_pretrained(tmp_path / "m", **options)


def small_model():
    return VisionTransformer(polymix.PomConfig(), image_size=8, patch_size=4, dim=8, depth=1, classes=2)


def test_the_memory_of_the_machine():
    assert 2**28 < memory_of() < 2**50
