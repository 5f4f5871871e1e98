"""Names and options: the type raised, and a message that names the argument, what came, what is allowed and the cure."""

import pytest

import polymix
from polymix import errors
from polymix.errors import OptionError, ShapeError, UnknownNameError
from tests.errors.helpers import says


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


def test_a_mixer_with_its_options_in_the_name_is_told_how_to_pass_them():
    """As the command line takes it."""
    error = says(lambda: polymix.create_mixer("padre:degree=3", 8), UnknownNameError, "name", "by keyword")
    assert error.allowed.startswith("padre,")


def test_polymorpher_passes_options_through_the_same_check():
    error = says(lambda: polymix.PolyMorpher(8, expnd=2), OptionError, "expnd", "options of pom")
    assert "pom: expand" in error.allowed


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
    ("softmax", {"heads": 3}, "heads", ["3", "divisor of dim=8 (1, 2, 4, 8)", "Change heads or dim"]),
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
    ("pom", {"decay": 0}, "decay", ["0", "at least 1"]),
    ("pom", {"decay": 3}, "decay", ["3", "divisor of expand · dim=16"]),
    ("pom", {"decay": 4, "reduction": "sum"}, "reduction", ["'sum' with decay=4", "'mean'"]),
    ("pom", {"decay": 4, "rotary": "1d"}, "rotary", ["'1d' with decay=4", "None"]),
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
    ("padre", {"preset": "table"}, "preset", ["'table'", "'equations', 'full'"]),
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


@pytest.mark.parametrize("dim", [0, -1, 8.0, "8", True, None])
def test_dim(dim):
    says(lambda: polymix.create_mixer("pom", dim), OptionError, "dim", repr(dim), "at least 1", "dim=1")


@pytest.mark.parametrize("name", list(polymix.list_mixers()))
def test_dim_is_checked_by_every_mixer(name):
    options = SA if name == "poly_sa" else {}
    says(lambda: polymix.create_mixer(name, 0, **options), OptionError, "dim", "0", "at least 1", "dim=1")


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
