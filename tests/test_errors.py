"""Every public check: the type raised, and a message that names the argument, what came, what is allowed and the cure.
Calls are checked before anything is computed."""

import inspect
import pickle
from contextlib import suppress

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import polymix
from polymix import errors
from polymix.errors import CapabilityError, MaskError, OptionError, ShapeError, StateError, UnknownNameError
from polymix.models import VisionTransformer
from tests.helpers import jitter, tokens

ANY = errors.PolymixError


def says(call, kind, argument, *words):
    """`call` raises `kind` about `argument`, and its message holds all of its parts and these words."""
    with pytest.raises(kind) as info:
        call()
    error, message = info.value, str(info.value)
    assert isinstance(error, errors.PolymixError)
    assert error.argument == argument
    assert str(error.got)
    assert error.allowed
    for part in (f"`{error.argument}`", str(error.got), error.allowed, error.cure, *words):
        assert part in message, f"{part!r} is missing from: {message}"
    return error


class NoCompute(TorchDispatchMode):
    """Any operation on tensors is an error, but for another view of the same numbers."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if not func.is_view and func is not torch.ops.aten.promote_types.default:
            raise AssertionError(f"{func} ran before the check")
        return func(*args, **(kwargs or {}))


def x(*shape, dtype=torch.float32):
    return tokens(*(shape or (2, 12, 8)), dtype=dtype)


# Names


@pytest.mark.parametrize(("name", "first"), [
    ("padr", "padre"), ("poly_n", "poly_nl"), ("polysa", "poly_sa"), ("softmaxx", "softmax"),
    ("PoM", "pom"), ("QT", "qt"),
])  # fmt: skip
def test_unknown_name_lists_the_known_nearest_first(name, first):
    error = says(lambda: polymix.create_mixer(name, 8), UnknownNameError, "name", repr(name), "nearest")
    listed = error.allowed.split(", ")
    assert listed[0] == first
    assert sorted(listed) == sorted(polymix.list_mixers())


def test_a_name_that_is_no_name():
    says(lambda: polymix.create_mixer(None, 8), UnknownNameError, "name", "None")


def test_a_name_can_be_taken_once():
    taken = polymix.register(polymix.PomMixer)
    says(lambda: taken(polymix.PomConfig), OptionError, "name", "pom", "not yet registered", "another name")


UNKNOWN = {
    "create_mixer": lambda name, **options: polymix.create_mixer(name, 8, **options),
    "changed": lambda name, **options: polymix.create_mixer(name, 8).config.changed(**options),
    "build": lambda name, **options: polymix.create_mixer(name, 8).config.build(8, **options),
}


@pytest.mark.parametrize("way", list(UNKNOWN))
@pytest.mark.parametrize(("name", "option", "first"), [
    ("padre", "degre", "degree"), ("padre", "kernelsize", "kernel_size"), ("pom", "selection_head", "selection_heads"),
    ("qt", "head", "heads"), ("softmax", "drop", "dropout"), ("linear_floor", "heads", "bias"),
])  # fmt: skip
def test_unknown_option_lists_the_known_nearest_first(way, name, option, first):
    call = UNKNOWN[way]
    error = says(lambda: call(name, **{option: 3}), OptionError, option, "unknown", f"options of {name}", "spelling")
    assert first in error.allowed
    if name != "linear_floor":  # which has no option that looks like heads
        assert error.allowed.split(": ")[1].split(", ")[0] == first


def test_polymorpher_passes_options_through_the_same_check():
    error = says(lambda: polymix.PolyMorpher(8, expnd=2), OptionError, "expnd", "options of pom")
    assert "pom: expand" in error.allowed


# Options: (mixer, options, the argument named, words of the message)

SA = {"grid": (3, 4)}
OPTIONS = [
    ("softmax", {"dropout": 1.0}, "dropout", ["1.0", "[0, 1)", "dropout=0.0"]),
    ("softmax", {"dropout": -0.1}, "dropout", ["-0.1", "[0, 1)"]),
    ("softmax", {"dropout": True}, "dropout", ["True", "[0, 1)"]),
    ("softmax", {"dropout": "much"}, "dropout", ["much", "[0, 1)"]),
    ("softmax", {"dropout": None}, "dropout", ["None", "[0, 1)"]),
    ("softmax", {"bias": "yes"}, "bias", ["'yes'", "True, False"]),
    ("linear_floor", {"bias": None}, "bias", ["None", "True, False"]),
    ("softmax", {"heads": 0}, "heads", ["0", "at least 1", "heads=1"]),
    ("softmax", {"heads": 2.0}, "heads", ["2.0", "an integer"]),
    ("softmax", {"heads": True}, "heads", ["True", "an integer"]),
    ("softmax", {"heads": 3}, "heads", ["3", "divisor of dim=8 (1, 2, 4, 8)", "Change one"]),
    ("qt", {"heads": 16}, "heads", ["16", "divisor of dim=8"]),
    ("poly_sa", {"heads": 5, **SA}, "heads", ["5", "divisor of dim=8"]),
    ("padre", {"heads": 3}, "heads", ["3", "divisor of dim=8"]),
    ("qt", {"form": "half"}, "form", ["'half'", "'compact', 'full'"]),
    ("qt", {"order": 3}, "order", ["3", "0, 1, 2"]),
    ("qt", {"order": 1.0}, "order", ["1.0", "0, 1, 2"]),
    ("poly_nl", {"order": 1}, "order", ["1", "3, 2, '2+3'"]),
    ("poly_nl", {"reduction": 3}, "reduction", ["3", "divisor of dim=8"]),
    ("poly_nl", {"reduction": 0}, "reduction", ["0", "at least 1"]),
    ("pom", {"degree": 0}, "degree", ["0", "at least 1", "degree=1"]),
    ("pom", {"degree": 2.5}, "degree", ["2.5", "an integer"]),
    ("pom", {"expand": 0}, "expand", ["0", "positive", "expand=2"]),
    ("pom", {"expand": "2"}, "expand", ["'2'", "positive"]),
    ("pom", {"expand": True}, "expand", ["True", "positive"]),
    ("pom", {"expand": 0.3}, "expand", ["0.3", "makes expand · 8 whole"]),
    ("pom", {"expand": float("nan")}, "expand", ["nan"]),
    ("pom", {"expand": float("inf")}, "expand", ["inf"]),
    ("pom", {"activation": "tanh"}, "activation", ["'tanh'", "'gelu', 'relu', 'identity', 'clamped_leaky_relu'"]),
    ("pom", {"gate": "relu"}, "gate", ["'relu'", "'sigmoid', 'hardsigmoid', 'identity'"]),
    ("pom", {"reduction": "max"}, "reduction", ["'max'", "'mean', 'sum'"]),
    ("pom", {"groups": 0}, "groups", ["0", "at least 1"]),
    ("pom", {"groups": 3}, "groups", ["3", "divisor of dim=8"]),
    ("pom", {"groups": 8, "expand": 0.5}, "groups", ["8", "divisor of expand · dim=4"]),
    ("pom", {"selection_heads": 0}, "selection_heads", ["0", "at least 1"]),
    ("pom", {"selection_heads": 3}, "selection_heads", ["3", "divisor of expand · dim=16"]),
    ("pom", {"rotary": "3d"}, "rotary", ["'3d'", "None, '1d', '2d'"]),
    ("pom", {"rotary": "1d", "expand": 1.125}, "rotary", ["expand · dim=9", "multiple of 2"]),
    ("pom", {"rotary": "2d", "selection_heads": 2}, "rotary", ["selection_heads=2", "multiple of 4"]),
    ("poly_sa", {}, "grid", ["None", "(N,) or (H, W)", 'positions="mean"']),
    ("poly_sa", {"grid": (2, 2, 3)}, "grid", ["(2, 2, 3)", "(N,) or (H, W)"]),
    ("poly_sa", {"grid": (12,), "head_mixing": "depthwise"}, "grid", ["(12,)", "(H, W)"]),
    ("poly_sa", {"grid": 12}, "grid", ["12"]),
    ("poly_sa", {"grid": (0, 4)}, "grid", ["0"]),
    ("poly_sa", {"grid": (-3, -4)}, "grid", ["-3"]),
    ("poly_sa", {"grid": (3.0, 4)}, "grid", ["3.0"]),
    ("poly_sa", {"sigma": "relu", **SA}, "sigma", ["'relu'", "'softmax', 'sigmoid', 'tanh', 'identity'"]),
    ("poly_sa", {"positions": "sine", **SA}, "positions", ["'sine'", "'learned', 'mean'"]),
    ("poly_sa", {"head_mixing": "dense", **SA}, "head_mixing", ["'dense'", "None, 'depthwise'"]),
    ("poly_sa", {"positions": "mean", **SA}, "positions", ["grid=(3, 4)", "play a part", "Leave them out"]),
    ("poly_sa", {"positions": "mean", "num_prefix_tokens": 1}, "positions", ["num_prefix_tokens=1", "Leave them out"]),
    ("poly_sa", {"num_prefix_tokens": -1, **SA}, "num_prefix_tokens", ["-1", "at least 0"]),
    ("padre", {"degree": 0}, "degree", ["0", "from 1 to 8"]),
    ("padre", {"degree": 9}, "degree", ["9", "from 1 to 8"]),
    ("padre", {"preset": "table"}, "preset", ["'table'", "'paper', 'full'"]),
    ("padre", {"weight": None}, "weight", ["None", "'ones', 'channel', 'full'"]),
    ("padre", {"constant": "ones"}, "constant", ["'ones'", "None, 'channel', 'full'"]),
    ("padre", {"normalize": "batch"}, "normalize", ["'batch'", "None, 'rms', 'layer'"]),
    ("padre", {"heads": 0}, "heads", ["0", "at least 1"]),
    ("padre", {"causal": "yes"}, "causal", ["'yes'", "True, False"]),
    ("padre", {"num_prefix_tokens": -1}, "num_prefix_tokens", ["-1", "at least 0"]),
    ("padre", {"grid": 12}, "grid", ["12", "(N,), (H, W) or (T, H, W)", "grid=(14, 14)"]),
    ("padre", {"grid": ()}, "grid", ["()", "(N,), (H, W) or (T, H, W)"]),
    ("padre", {"grid": (1, 2, 2, 3)}, "grid", ["(1, 2, 2, 3)", "(T, H, W)"]),
    ("padre", {"grid": (0, 3)}, "grid", ["0", "at least 1"]),
    ("padre", {"grid": (3, 4), "causal": True}, "causal", ["grid=(3, 4)", "1-D sequences", "no meaning on a grid"]),
    ("padre", {"num_prefix_tokens": 1, "causal": True}, "causal", ["num_prefix_tokens=1", "without prefix tokens"]),
    ("padre", {"weight": "full"}, "weight", ["without a grid", "grid=(N,)"]),
    ("padre", {"constant": "full"}, "constant", ["without a grid", "grid=(N,)"]),
    ("padre", {"kernel_size": 4}, "kernel_size", ["4", "odd", "Use 3 or 5"]),
    ("padre", {"kernel_size": 0}, "kernel_size", ["0", "at least 1"]),
    ("padre", {"kernel_size": (3, 3)}, "kernel_size", ["(3, 3)", "one number, or 1"]),
    ("padre", {"kernel_size": (3,), "grid": (3, 4)}, "kernel_size", ["(3,)", "one number, or 2", "grid=(3, 4)"]),
    ("padre", {"kernel_size": 3.5}, "kernel_size", ["3.5"]),
    ("padre", {"kernel_size": None}, "kernel_size", ["None"]),
    ("padre", {"terms": ()}, "terms", ["()", "different degrees from 1 to 2"]),
    ("padre", {"terms": (2, 2)}, "terms", ["(2, 2)", "different degrees"]),
    ("padre", {"terms": (0, 2)}, "terms", ["(0, 2)", "from 1 to 2"]),
    ("padre", {"terms": (3,)}, "terms", ["(3,)", "from 1 to 2"]),
    ("padre", {"terms": (1, 2), "degree": 3}, "terms", ["(1, 2)", "include the degree, 3", "Use degree=2"]),
    ("padre", {"terms": 2}, "terms", ["2", "from 1 to 2"]),
    ("padre", {"A": "toeplitz:width=3"}, "A", ["'toeplitz:width=3'", "filter=…"]),
    ("padre", {"B": "monarch:block=2"}, "B", ["'monarch:block=2'", "monarch with blocks=…"]),
    ("padre", {"C": ("depthwise",) * 2}, "C", ["('depthwise', 'depthwise')", "1 of them at degree 2"]),
    ("padre", {"D": "sparse:rank=2", "degree": 3}, "D", ["'sparse:rank=2'", "density=…"]),
    ("padre", {"A": 5}, "A", ["5"]),
    ("padre", {"C": "depthwise", "degree": 1}, "C", ["'depthwise'", "has no C", "Leave it out"]),
    ("padre", {"A": "identity", "kernel_size": 3}, "kernel_size", ["without a depthwise map", "plays a part", 'A="depthwise"']),
    ("padre", {"A": "identity", "causal": True}, "causal", ["all identities", "plays a part"]),
    ("padre", {"A": "identity", "num_prefix_tokens": 1}, "num_prefix_tokens", ["all identities", "plays a part"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "argument", "words"), OPTIONS, ids=lambda part: str(part)[:40])
def test_options(name, options, argument, words):
    says(lambda: polymix.create_mixer(name, 8, **options), OptionError, argument, *words)


@pytest.mark.parametrize("name", list(polymix.list_mixers()))
@pytest.mark.parametrize("dim", [0, -1, 8.0, "8", True, None])
def test_dim(name, dim):
    options = SA if name == "poly_sa" else {}
    says(lambda: polymix.create_mixer(name, dim, **options), OptionError, "dim", repr(dim), "at least 1", "dim=1")


def test_a_changed_option_is_checked_again():
    config = polymix.PadreConfig(degree=3, terms=(2, 3))
    says(lambda: config.changed(degree=2), OptionError, "terms", "(2, 3)", "from 1 to 2")
    says(lambda: config.build(8, kernel_size=4), OptionError, "kernel_size", "odd")


@pytest.mark.parametrize("n", [0, -3, 2.0])
@pytest.mark.parametrize("what", ["cost", "matrices"])
def test_n_of_cost_and_matrices(what, n):
    says(lambda: getattr(polymix.create_mixer("pom", 8), what)(n), OptionError, "n", repr(n), "at least 1")


@pytest.mark.parametrize("what", ["cost", "matrices"])
@pytest.mark.parametrize(("name", "options"), [("padre", {}), ("padre", {"grid": (4,)}), ("poly_sa", {"grid": (4,)})])
def test_cost_and_matrices_of_fewer_tokens_than_the_prefix(what, name, options):
    mixer = polymix.create_mixer(name, 8, num_prefix_tokens=3, **options)
    with pytest.raises(errors.PolymixError, match="prefix"):
        getattr(mixer, what)(2)


@pytest.mark.parametrize("what", ["cost", "matrices"])
def test_cost_and_matrices_check_the_grid(what):
    mixer = polymix.create_mixer("padre", 8, grid=(3, 4))
    says(lambda: getattr(mixer, what)(13), ShapeError, "grid", "12 tokens for 13")
    says(lambda: getattr(mixer, what)(12, grid=(12,)), ShapeError, "grid", "2 axes")


# Calls: (mixer, options, arguments of the call, type, argument named, words of the message)

X = x()
PAD = torch.ones(2, 12, dtype=torch.bool)
SEEN = torch.ones(2, 12, 12, dtype=torch.bool)
IDS = torch.zeros(2, 12, dtype=torch.int64)
CAUSAL, GRID, PREFIX = {"causal": True}, {"grid": (3, 4)}, {"num_prefix_tokens": 3}
FULL, FLAT, MEAN = {"weight": "full", "grid": (3, 4)}, {"rotary": "2d"}, {"positions": "mean"}
CALLS = {
    # tokens
    "x-no-tensor": ("pom", {}, {"x": [1.0]}, ShapeError, "x", ["list", "(B, N, 8)", "dim=8"]),
    "x-axes": ("pom", {}, {"x": x(12, 8)}, ShapeError, "x", ["(12, 8)", "(B, N, 8)"]),
    "x-width": ("padre", {}, {"x": x(2, 12, 7)}, ShapeError, "x", ["(2, 12, 7)", "(B, N, 8)", "built with dim=8"]),
    "x-empty": ("pom", {}, {"x": x(2, 0, 8)}, ShapeError, "x", ["(2, 0, 8)", "N ≥ 1"]),
    "x-dtype": ("qt", {}, {"x": x(2, 12, 8, dtype=torch.float64)}, ShapeError, "x", ["float64", ".to(dtype)"]),
    "x-integers": ("pom", {}, {"x": IDS[..., None].expand(2, 12, 8)}, ShapeError, "x", ["int64", "float32"]),
    "x-device": ("pom", {}, {"x": X.to("meta")}, ShapeError, "x", ["meta", "cpu", ".to(device)"]),
    "map-width": ("poly_nl", {}, {"x": x(2, 7, 3, 4)}, ShapeError, "x", ["(2, 12, 7)", "(B, N, 8)"]),
    "prefix-all": ("padre", PREFIX, {"x": x(2, 3, 8)}, ShapeError, "x", ["(2, 3, 8)", "more than num_prefix_tokens=3"]),
    "prefix-more": ("poly_sa", {**PREFIX, "grid": (4,)}, {"x": x(2, 2, 8)}, ShapeError, "x", ["num_prefix_tokens=3"]),
    # context
    "context-axes": ("pom", {}, {"context": x(12, 8)}, ShapeError, "context", ["(12, 8)", "(B, N, 8)"]),
    "context-width": ("softmax", {}, {"context": x(2, 5, 6)}, ShapeError, "context", ["(2, 5, 6)", "(B, N, 8)"]),
    "context-empty": ("qt", {}, {"context": x(2, 0, 8)}, ShapeError, "context", ["(2, 0, 8)", "N ≥ 1"]),
    "context-batch": ("qt", {}, {"context": x(3, 5, 8)}, ShapeError, "context", ["(3, 5, 8)", "(2, M, 8)"]),
    "context-dtype": ("pom", {}, {"context": X.half()}, ShapeError, "context", ["float16", "float32"]),
    "context-device": ("pom", {}, {"context": X.to("meta")}, ShapeError, "context", ["meta", "cpu"]),
    # masks
    "mask-float": ("pom", {}, {"mask": PAD.float()}, MaskError, "mask", ["float32", "True = takes part", "> 0"]),
    "mask-integers": ("qt", {}, {"mask": IDS}, MaskError, "mask", ["int64", "boolean"]),
    "mask-no-tensor": ("pom", {}, {"mask": [True] * 12}, MaskError, "mask", ["list", "boolean"]),
    "mask-batch": ("pom", {}, {"mask": PAD[:1]}, MaskError, "mask", ["(1, 12)", "(2, 12)", "(2, 12, 12)", "Expand"]),
    "mask-length": ("poly_nl", {}, {"mask": PAD[:, 1:]}, MaskError, "mask", ["(2, 11)", "(2, 12)"]),
    "mask-axes": ("softmax", {}, {"mask": SEEN[:, None]}, MaskError, "mask", ["(2, 1, 12, 12)", "(2, 12, 12)"]),
    "mask-context": ("pom", {}, {"context": x(2, 5, 8), "mask": PAD}, MaskError, "mask", ["(2, 5)", "(2, 12, 5)"]),
    "mask-device": ("pom", {}, {"mask": PAD.to("meta")}, ANY, "mask", ["meta", "cpu"]),
    # segments
    "segments-float": ("pom", {}, {"segments": IDS.float()}, MaskError, "segments", ["float32", "integer ids (2, 12)"]),
    "segments-bool": ("softmax", {}, {"segments": PAD}, MaskError, "segments", ["bool", "integer ids (2, 12)"]),
    "segments-shape": ("pom", {}, {"segments": IDS[:, 1:]}, MaskError, "segments", ["(2, 11)", "One id a token"]),
    "segments-list": ("pom", {}, {"segments": [0] * 12}, MaskError, "segments", ["list", "integer ids"]),
    "segments-one": ("pom", {}, {"context": x(2, 5, 8), "segments": IDS}, MaskError, "segments", ["Tensor", "a pair"]),
    "segments-pair": ("pom", {}, {"segments": (IDS, IDS)}, MaskError, "segments", ["tuple", "one tensor without"]),
    "segments-second": ("pom", {}, {"context": x(2, 5, 8), "segments": (IDS, IDS)}, MaskError, "segments", ["(2, 5)"]),
    "segments-device": ("pom", {}, {"segments": IDS.to("meta")}, ANY, "segments", ["meta", "cpu"]),
    # causal
    "causal-word": ("pom", {}, {"causal": "yes"}, MaskError, "causal", ["'yes'", "block length"]),
    "causal-negative": ("qt", {}, {"causal": -1}, MaskError, "causal", ["-1", "block length"]),
    "causal-float": ("softmax", {}, {"causal": 1.0}, MaskError, "causal", ["1.0", "block length"]),
    "causal-context": ("pom", {}, {"context": X, **CAUSAL}, MaskError, "causal", ["separate context"]),
    "causal-off": ("padre", CAUSAL, {"causal": False}, MaskError, "causal", ["False", "built causal", "causal=False"]),
    "causal-blocks": ("padre", CAUSAL, {"causal": 3}, MaskError, "causal", ["3", "built causal"]),
    # grids
    "grid-of-n": ("padre", GRID, {"x": x(2, 13, 8)}, ShapeError, "grid", ["(3, 4) = 12 tokens for 13", "Pass grid="]),
    "grid-of-sa": ("poly_sa", GRID, {"x": x(2, 13, 8)}, ShapeError, "grid", ["12 tokens for 13"]),
    "grid-wrong": ("padre", GRID, {"grid": (5, 3)}, ShapeError, "grid", ["(5, 3) = 15 tokens for 12", "grid of 12"]),
    "grid-prefix": ("padre", {**GRID, **PREFIX}, {}, ShapeError, "grid", ["12 tokens for 9", "prefix"]),
    "grid-axes": ("padre", GRID, {"grid": (12,)}, ShapeError, "grid", ["(12,)", "2 axes", "other grid"]),
    "grid-3-axes": ("poly_sa", GRID, {"grid": (1, 3, 4)}, ShapeError, "grid", ["(1, 3, 4)", "2 axes"]),
    "grid-float": ("padre", GRID, {"grid": (3.0, 4)}, ShapeError, "grid", ["(3.0, 4)"]),
    "grid-number": ("padre", GRID, {"grid": 12}, ShapeError, "grid", ["12", "2 axes"]),
    "grid-negative": ("padre", GRID, {"grid": (-3, -4)}, ShapeError, "grid", ["(-3, -4)"]),
    "grid-missing": ("pom", FLAT, {}, ShapeError, "grid", ["None", "(H, W)", 'rotary="2d"']),
    "grid-rotary": ("pom", FLAT, {"grid": (5, 3)}, ShapeError, "grid", ["(5, 3) = 15 tokens for 12"]),
    "grid-full": ("padre", FULL, {"grid": (4, 3)}, ShapeError, "grid", ["(4, 3)", "(3, 4)", 'weight="channel"']),
    "grid-full-1d": ("padre", {**FULL, "grid": (9,)}, {}, ShapeError, "grid", ["(12,)", "(9,)", "built for"]),
    # what a mixer cannot do; the message names those that can
    "no-mask": ("linear_floor", {}, {"mask": PAD}, CapabilityError, "mask", ["mask", "padre, poly_nl, poly_sa"]),
    "no-mask-learned": ("poly_sa", GRID, {"mask": PAD}, CapabilityError, "mask", ["mask", "pom", "other options"]),
    "no-arbitrary": ("qt", {}, {"mask": SEEN}, CapabilityError, "mask", ["mask of shape (2, 12, 12)", "pom, softmax"]),
    "no-arbitrary-nl": ("poly_nl", {}, {"mask": SEEN}, CapabilityError, "mask", ["mask", "pom, softmax"]),
    "no-context": ("padre", {}, {"context": X}, CapabilityError, "context", ["context", "pom, qt, softmax"]),
    "no-context-2d": ("pom", FLAT, {"context": X, **GRID}, CapabilityError, "context", ["context", "qt, softmax"]),
    "no-causal": ("poly_nl", {}, CAUSAL, CapabilityError, "causal", ["causal", "padre, pom, qt, softmax"]),
    "no-causal-padre": ("padre", {}, CAUSAL, CapabilityError, "causal", ["causal", "pom, qt, softmax", "other options"]),
    "no-blocks": ("qt", {}, {"causal": 3}, CapabilityError, "causal", ["causal", "blocks of 3", "pom, softmax"]),
    "no-segments": ("qt", {}, {"segments": IDS}, CapabilityError, "segments", ["segments", "pom, softmax"]),
    "no-segments-2d": ("pom", FLAT, {"segments": IDS, **GRID}, CapabilityError, "segments", ["segments", "other options"]),
    "no-grid": ("qt", {}, GRID, CapabilityError, "grid", ["grid=(3, 4)", "padre, poly_sa, pom"]),
    "no-grid-pom": ("pom", {}, GRID, CapabilityError, "grid", ["grid=(3, 4)", "padre, poly_sa", "other options"]),
    "no-grid-mean": ("poly_sa", MEAN, GRID, CapabilityError, "grid", ["grid=(3, 4)", "padre, pom", "other options"]),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CALLS))
def test_calls_are_checked_before_any_compute(case):
    name, options, arguments, kind, argument, words = CALLS[case]
    mixer, arguments = polymix.create_mixer(name, 8, **options), {"x": x(), **arguments}
    with NoCompute():
        says(lambda: mixer(**arguments), kind, argument, *words)


@pytest.mark.parametrize("name", ["softmax", "linear_floor", "poly_nl", "poly_sa", "padre", "pom", "padre-full"])
@pytest.mark.parametrize("way", ["prefill", "step"])
def test_recurrence_where_there_is_none(name, way):
    options = {"poly_sa": GRID, "pom": FLAT, "padre-full": {"weight": "full", "grid": (12,), **CAUSAL}}.get(name, {})
    name = name.split("-")[0]
    mixer = polymix.create_mixer(name, 8, **options)
    others = [other for other in ("padre", "pom", "qt") if other != name]
    cure = "other options" if name in ("padre", "pom") else "Use one of those"
    with NoCompute():
        says(lambda: getattr(mixer, way)(X), CapabilityError, name, "prefill and step", ", ".join(others), cure)


RECURRENT = {"pom": {}, "qt": {}, "padre": CAUSAL}


@pytest.mark.parametrize("name", list(RECURRENT))
def test_prefill_and_step_check_their_tokens(name):
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    narrow, wide = x(2, 7), X.double()
    with NoCompute():
        says(lambda: mixer.step(X), ShapeError, "x_t", "(2, 12, 8)", "(B, 8) or (B, 1, 8)", "prefill for more tokens")
        says(lambda: mixer.step(X[0, 0]), ShapeError, "x_t", "(8,)", "(B, 8) or (B, 1, 8)")
        says(lambda: mixer.step(None), ShapeError, "x_t", "NoneType", "(B, 8) or (B, 1, 8)")
        says(lambda: mixer.step(narrow), ShapeError, "x", "(2, 1, 7)", "(B, N, 8)")
        says(lambda: mixer.prefill(wide), ShapeError, "x", "float64")
        says(lambda: mixer.prefill(X, mask=IDS), MaskError, "mask", "int64")
        says(lambda: mixer.prefill(X, mask=PAD[:, 1:]), MaskError, "mask", "(2, 11)")


@pytest.mark.parametrize("name", list(RECURRENT))
@pytest.mark.parametrize("shape", [(2, 12, 12), (12, 12, 12)])
def test_prefill_takes_padding_alone(name, shape):
    """An arbitrary mask has no meaning for a running state; (12, 12, 12) would even broadcast."""
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    with pytest.raises(errors.PolymixError, match="mask"):
        mixer.prefill(x(shape[0], 12, 8), mask=torch.ones(shape, dtype=torch.bool))


STATES = {
    "pom": ("PomState", lambda: polymix.create_mixer("pom", 8, expand=3), "(2, 24)"),
    "qt": ("QtState", lambda: polymix.create_mixer("qt", 8, heads=2), "(2, 2, 9, 5)"),
    "padre": ("PadreState", lambda: polymix.create_mixer("padre", 8, kernel_size=3, causal=True), "(2, 2, 8)"),
}


@pytest.mark.parametrize("name", list(RECURRENT))
def test_states_of_another_mixer_or_batch(name):
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    kind, other, _ = STATES[name]
    foreign = [polymix.create_mixer(n, 8, **RECURRENT[n]).prefill(X)[1] for n in RECURRENT if n != name]
    for state in (*foreign, other().prefill(X)[1], mixer.prefill(x(3, 12, 8))[1], (1, 2), "state", {}):
        with NoCompute():
            for call in (lambda s=state: mixer.prefill(X, s), lambda s=state: mixer.step(X[:, 0], s)):
                says(call, StateError, "state", type(state).__name__, f"a {kind}", "prefill or step of this mixer")


@pytest.mark.parametrize("name", list(RECURRENT))
def test_a_state_of_another_shape_says_which(name):
    """The type alone explains nothing where both sides are the same type."""
    mixer, (_, other, shape) = polymix.create_mixer(name, 8, **RECURRENT[name]), STATES[name]
    says(lambda: mixer.prefill(X, other().prefill(X)[1]), StateError, "state", shape)


@pytest.mark.parametrize("name", list(RECURRENT))
def test_a_state_on_another_device(name):
    mixer = polymix.create_mixer(name, 8, **RECURRENT[name])
    _, state = mixer.prefill(X)
    away = type(state)(*(tuple(w.to("meta") for w in p) if isinstance(p, tuple) else p.to("meta") for p in state))
    says(lambda: mixer.prefill(X, away), ANY, "state", "meta")


def test_autocast_takes_other_float_types():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert polymix.create_mixer("pom", 8)(x().bfloat16()).shape == (2, 12, 8)


# The host and the blocks


def host(**changes):
    options = {"mixer": polymix.PomConfig(), "image_size": 8, "patch_size": 4, "dim": 8, "depth": 1, "classes": 3}
    return VisionTransformer(**{**options, **changes})


@pytest.mark.parametrize(("option", "value", "words"), [
    ("depth", 0, ["0", "depth=1"]), ("classes", 0, ["0", "at least 1"]), ("patch_size", 0, ["0", "at least 1"]),
    ("patch_size", 2.0, ["2.0", "an integer"]), ("dim", 0, ["0", "at least 1"]), ("dim", "8", ["'8'", "an integer"]),
    ("image_size", 10, ["10", "multiple of patch_size=4", "Change one"]), ("image_size", 0, ["0", "multiple"]),
    ("image_size", (8, 10), ["(8, 10)", "multiple"]), ("image_size", (8,), ["(8,)"]), ("image_size", 8.0, ["8.0"]),
    ("image_size", "8", ["8"]), ("channels", 0, ["0"]), ("mixer", "pom", ["pom"]), ("mixer", None, ["None"]),
    ("mlp_ratio", 0, ["0"]), ("mlp_ratio", -1.0, ["-1.0"]),
])  # fmt: skip
def test_vision_transformer_options(option, value, words):
    says(lambda: host(**{option: value}), OptionError, option, *words)


@pytest.mark.parametrize(("images", "words"), [
    (x(2, 3, 8, 9), ["(2, 3, 8, 9)", "(B, 3, 8, 8)", "Resize"]), (x(2, 1, 8, 8), ["(2, 1, 8, 8)", "(B, 3, 8, 8)"]),
    (x(3, 8, 8), ["(3, 8, 8)", "(B, 3, 8, 8)"]), ([1.0], ["list", "(B, 3, 8, 8)"]),
    (x(2, 3, 8, 8, dtype=torch.float64), ["float64", "float32"]), (x(2, 3, 8, 8).to("meta"), ["meta", "cpu"]),
    (torch.zeros(2, 3, 8, 8, dtype=torch.uint8), ["uint8", "float32"]),
])  # fmt: skip
def test_vision_transformer_images(images, words):
    model = host()
    with NoCompute():
        says(lambda: model(images), ShapeError, "images", *words)


def test_vision_transformer_with_a_causal_mixer_and_a_class_token():
    """In front, the token would see itself alone, and every image get the same answer: refuse, or let it see them."""
    model = None
    with suppress(errors.PolymixError):
        model = host(mixer=polymix.PadreConfig(causal=True, kernel_size=3), class_token=True)
    if model is not None:
        a, b = jitter(model)(x(2, 3, 8, 8))
        assert (a - b).abs().max() > 1e-3, "the logits do not depend on the image"


@pytest.mark.parametrize(("option", "value"), [("norm", "batch"), ("mixer", "pom"), ("mlp_ratio", 0), ("dropout", 2.0)])
def test_block_options(option, value):
    options = {"mixer": polymix.PomConfig(), option: value}
    says(lambda: polymix.MixerBlock(8, **options), OptionError, option, str(value))


# The errors themselves

KINDS = [kind for _, kind in inspect.getmembers(errors, inspect.isclass) if issubclass(kind, errors.PolymixError)]


@pytest.mark.parametrize("kind", KINDS)
def test_errors_pickle(kind):
    """They come back whole from a data loader's worker or another rank."""
    error = kind("mask", (2, 3), "a boolean tensor", "Compare first.")
    other = pickle.loads(pickle.dumps(error))
    assert type(other) is kind
    assert str(other) == str(error) == "`mask`: got (2, 3); allowed: a boolean tensor. Compare first."
    assert vars(other) == vars(error)


def test_errors_are_also_what_python_calls_them():
    bases = {
        OptionError: ValueError, ShapeError: ValueError, MaskError: ValueError, StateError: ValueError,
        CapabilityError: NotImplementedError, UnknownNameError: LookupError, errors.MissingExtraError: ImportError,
        errors.DataError: ValueError, errors.ResultsError: ValueError,
    }  # fmt: skip
    assert set(bases) | {errors.PolymixError} == set(KINDS)
    for kind, base in bases.items():
        assert issubclass(kind, base)


def test_an_error_without_a_cure_ends_with_what_is_allowed():
    assert str(OptionError("a", 1, "2")) == "`a`: got 1; allowed: 2."


def test_check_int_knows_both_ends():
    errors.check_int("k", 3, 1, 3)
    says(lambda: errors.check_int("k", 4, 1, 3), OptionError, "k", "4", "from 1 to 3", "k=1")
