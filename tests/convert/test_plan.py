"""Plans name what they mean: every form, and an error for every plan that does not fit the layers."""

from types import SimpleNamespace

import pytest
from torch import nn

import polymix
from polymix.convert.plan import resolve
from polymix.errors import OptionError, PolymixError, UnknownNameError
from polymix.mixers import PadreConfig, PomConfig, QtConfig

LAYERS = [f"blocks.{i}.attn" for i in range(4)]
PADRE, POM, QT = PadreConfig(degree=3), PomConfig(), QtConfig()


def names(plan, layers=LAYERS, **options):
    """The names of the mixers, "" where attention is kept."""
    return [config.name if config else "" for config in resolve(plan, layers, **options).values()]


@pytest.mark.parametrize("plan", [PADRE, "padre:degree=3", "padre-3"])
def test_a_mixer_alone_is_for_every_layer(plan):
    assert resolve(plan, LAYERS) == dict.fromkeys(LAYERS, PADRE)


@pytest.mark.parametrize(
    ("plan", "expected"),
    [
        ("1:1", ["padre", "", "padre", ""]),
        ("3:1", ["padre", "padre", "padre", ""]),
        ("1:2", ["padre", "", "", "padre"]),
        ("all-but-last-2", ["padre", "padre", "", ""]),
        ("all-but-first-1", ["", "padre", "padre", "padre"]),
        ("all-but-last-0", ["padre"] * 4),
    ],
)
def test_patterns(plan, expected):
    assert names(plan) == expected
    assert names(plan, mixer=QT) == [name and "qt" for name in expected], "what the pattern puts in"
    assert names(plan, mixer="qt") == names(plan, mixer=QT)


@pytest.mark.parametrize("plan", ["0:1", "1:0", "all-but-last-4", "all-but-first-7"])
def test_patterns_that_leave_nothing_to_choose(plan):
    with pytest.raises(OptionError, match=plan):
        resolve(plan, LAYERS)


def test_globs_and_names():
    assert names({"blocks.*.attn": PADRE}) == ["padre"] * 4
    assert names({"blocks.[01].attn": "padre", "blocks.[23].attn": POM}) == ["padre", "padre", "pom", "pom"]
    assert names({"blocks.*": PADRE}) == ["padre"] * 4, "a star reaches over dots"
    assert names({"blocks.2.attn": "qt"}) == ["", "", "qt", ""], "layers that nothing names are kept"
    assert names({}) == [""] * 4


@pytest.mark.parametrize("turn", [1, -1])
def test_a_name_says_more_than_a_glob_wherever_it_stands(turn):
    plan = dict(list({"blocks.*.attn": PADRE, "blocks.3.attn": "keep", "blocks.1.attn": POM}.items())[::turn])
    assert names(plan) == ["padre", "pom", "padre", ""]


def test_keep_by_glob():
    assert names({"blocks.[12].attn": "keep", "blocks.[03].attn": PADRE}) == ["padre", "", "", "padre"]


def test_two_globs_for_one_layer_are_an_error_with_a_cure_that_works():
    plan = {"blocks.[012].attn": PADRE, "*.2.attn": POM}
    with pytest.raises(
        OptionError, match=r"'blocks.\[012\].attn' and '\*.2.attn', which both match blocks.2.attn"
    ) as error:
        resolve(plan, LAYERS)
    assert error.value.cure == "Narrow one, or add 'blocks.2.attn' itself."
    assert names({**plan, "blocks.2.attn": "qt"}) == ["padre", "padre", "qt", ""]


@pytest.mark.parametrize("key", ["blocks.7.attn", "block.*.attn", "", 3])
def test_a_key_that_names_no_layer_is_an_error_that_lists_the_layers(key):
    with pytest.raises(OptionError, match="matches no attention layer") as error:
        resolve({"blocks.0.attn": PADRE, key: PADRE}, LAYERS)
    assert all(name in error.value.allowed for name in LAYERS)


@pytest.mark.parametrize(
    ("plan", "kind", "match"),
    [
        ("padr", UnknownNameError, "padre"),
        ({"*": "padr"}, UnknownNameError, "padre"),
        ("padre:degre=3", OptionError, "degree"),
        (7, OptionError, "plan.*all-but-last-2"),
        (None, OptionError, "plan"),
        ({"*": 7}, OptionError, r"plan\['\*'\]"),
        (("1:1", "padre"), OptionError, "plan"),
    ],
)
def test_what_is_no_plan(plan, kind, match):
    with pytest.raises(kind, match=match):
        resolve(plan, LAYERS)


def test_what_a_pattern_cannot_put_in():
    with pytest.raises(OptionError, match="mixer"):
        resolve("1:1", LAYERS, mixer=7)
    with pytest.raises(UnknownNameError, match="padre"):
        resolve("1:1", LAYERS, mixer="1:1")


def test_what_recommend_answers_is_a_plan():
    answer = SimpleNamespace(plan=lambda: {"blocks.0.attn": PADRE, "blocks.3.attn": "keep"})
    assert names(answer) == ["padre", "", "", ""]


def test_the_plan_of_a_model_counts_its_attention_layers_in_their_order():
    model = nn.Sequential(*(nn.TransformerEncoderLayer(8, 2, 8, batch_first=True) for _ in range(3)))
    report = polymix.convert(model, "all-but-last-1", mixer="pom", copy=True)
    assert [(layer.name, layer.now) for layer in report.layers] == [
        ("0.self_attn", "pom"), ("1.self_attn", "pom"), ("2.self_attn", None),
    ]  # fmt: skip
    with pytest.raises(PolymixError, match="all 3 layers"):
        polymix.convert(model, "all-but-last-3")
