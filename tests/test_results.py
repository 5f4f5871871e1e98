"""The types of results.json are what is checked, and what the JSON Schema says."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import jsonschema
import pytest

from polymix.cli import main
from polymix.errors import ResultsError
from polymix.measure import manifest
from polymix.results import Between, Count, Machine, Share, empty_parts, read_results, schema_of, wrong_part
from polymix.train.rows import PredictContent, TrainContent, TrainRow
from polymix.workflows.bench.run import Content as BenchContent
from polymix.workflows.compare.content import Content as CompareContent
from polymix.workflows.convert.content import ConvertContent
from polymix.workflows.evaluate import Evaluation

RESULTS = Path(__file__).parents[1] / "benchmarks" / "results"
KINDS = (BenchContent, CompareContent, ConvertContent, Evaluation, PredictContent, TrainContent)


class Optional(TypedDict, total=False):
    note: str


@dataclass
class Point:
    x: float
    class_: int


Pass = TypedDict("Pass", {"pass": Literal["forward", "step"]})


class Everything(Optional):
    schema: Literal["polymix.example/1"]
    flag: bool
    count: Count
    share: Annotated[Share | None, "of all"]
    names: Annotated[list[str], Between(1, 3)]
    sizes: dict[str, int]
    points: list[Point]
    more: list[int]
    last: Point | None
    passes: Pass
    free: Any


WHOLE = {
    "schema": "polymix.example/1", "flag": True, "count": 3, "share": None, "names": ["a"], "sizes": {"a": 1},
    "points": [{"x": 1, "class": 2}], "more": [], "last": {"x": 0.5, "class": 1}, "passes": {"pass": "step"}, "free": [{}],
}  # fmt: skip
WRONG = [
    ({"flag": 1}, "'flag' as 1"),
    ({"count": True}, "'count' as True"),
    ({"count": 0}, "'count' as 0"),
    ({"count": 2.0}, "'count' as 2.0"),
    ({"share": 1.5}, "'share' as 1.5"),
    ({"share": "half"}, "'share' as str"),
    ({"names": []}, "'names' as list"),
    ({"names": list("abcd")}, "'names' as list"),
    ({"names": ["a", 1]}, "'names[1]' as 1"),
    ({"names": {"a": 1}}, "'names' as dict"),
    ({"sizes": {"a": None}}, "'sizes.a' as NoneType"),
    ({"points": [{"x": 1.0, "class": 1}, {"x": 1.0}]}, "a file without 'points[1].class'"),
    ({"points": [{"x": None, "class": 1}]}, "'points[0].x' as NoneType"),
    ({"last": {"x": "a", "class": 1}}, "'last.x' as str"),
    ({"last": 3}, "'last' as 3"),
    ({"passes": {"pass": "sideways"}}, "'passes.pass' as str"),
    ({"note": None}, "'note' as NoneType"),
]


def valid(content, schema):
    try:
        jsonschema.validate(content, schema)
    except jsonschema.ValidationError:
        return False
    return True


@pytest.mark.parametrize("content", [WHOLE, {**WHOLE, "note": "x"}, {**WHOLE, "share": 1, "last": None, "free": 3}])
def test_what_is_right_passes(content):
    assert wrong_part(content, Everything) is None
    assert valid(content, schema_of(Everything))


@pytest.mark.parametrize(("change", "words"), WRONG, ids=lambda part: part if isinstance(part, str) else "")
def test_the_wrong_part_is_named_and_the_schema_refuses_it_too(change, words):
    content = {**WHOLE, **change}
    assert wrong_part(content, Everything) == words
    # A JSON Schema has one kind of number: 2.0 is an integer.
    assert change == {"count": 2.0} or not valid(content, schema_of(Everything))


def test_every_key_that_is_not_optional_must_be_there():
    for key in WHOLE:
        content = {other: value for other, value in WHOLE.items() if other != key}
        assert wrong_part(content, Everything) == f"a file without {key!r}"
        assert not valid(content, schema_of(Everything))


def test_a_key_of_a_later_version_is_let_through_but_is_not_in_the_schema():
    assert wrong_part({**WHOLE, "new": 1}, Everything) is None
    assert not valid({**WHOLE, "new": 1}, schema_of(Everything))


def test_what_is_empty_before_anything_is_known():
    parts = empty_parts(Everything)
    assert parts == {"share": None, "sizes": {}, "points": [], "more": [], "last": None, "free": None}
    parts["points"].append(1)
    assert parts["more"] == empty_parts(Everything)["points"] == [], "parts share a list"


def test_the_schema_says_what_each_part_means():
    schema = schema_of(Everything)
    assert schema["properties"]["share"]["description"] == "of all"
    assert schema["properties"]["count"] == {"type": "integer", "minimum": 1}
    assert schema["properties"]["names"] == {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": 3}


def test_an_error_is_one_line_that_names_the_file_and_the_part(tmp_path):
    path = tmp_path / "results.json"
    path.write_text(json.dumps({**WHOLE, "points": [{"x": "a", "class": 1}]}))
    with pytest.raises(ResultsError) as error:
        read_results(path, Everything, "polymix example")
    assert str(path) in str(error.value) and "'points[0].x' as str" in str(error.value)
    assert "\n" not in str(error.value)
    path.write_text(json.dumps({**WHOLE, "schema": "polymix.example/2"}))
    with pytest.raises(ResultsError, match="Another program or version"):
        read_results(path, Everything, "polymix example")


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: f"{kind.__module__}.{kind.__name__}")
def test_every_kind_has_a_schema_that_is_one(kind):
    schema = schema_of(kind)
    jsonschema.Draft202012Validator.check_schema(schema)
    assert schema["properties"]["schema"]["enum"][0].startswith("polymix.")


def test_the_machine_is_as_its_type_says():
    assert valid(manifest("cpu", 2), schema_of(Machine))


@pytest.mark.parametrize(
    ("kind", "folder"),
    [
        (BenchContent, "bench"),
        (CompareContent, "compare-fashion"),
        (CompareContent, "compare-scenes"),
        (CompareContent, "compare-padre"),
        (CompareContent, "compare-fashion-hybrid"),
        (CompareContent, "compare-scenes-hybrid"),
    ],
)
def test_published_results_have_the_types_of_today(kind, folder):
    content = read_results(RESULTS / folder / "results.json", kind, "polymix")
    jsonschema.validate(content, schema_of(kind))


@pytest.mark.parametrize("path", sorted(RESULTS.glob("tasks/*/results.json")), ids=lambda path: path.parent.name)
def test_published_rows_of_tasks_have_the_types_of_today(path):
    jsonschema.validate(json.loads(path.read_text("utf-8"))["rows"], schema_of(list[TrainRow]))


def test_what_a_training_writes_is_what_its_type_says(tmp_path):
    small = ["--steps", "2", "--tokens", "64", "--answers", "8", "--mixer", "pom", "--hidden-size", "8"]
    with pytest.raises(SystemExit):
        main(["train", "recall", *small, "--threads", "1", "--out", str(tmp_path)])
    content = json.loads((tmp_path / "results.json").read_text("utf-8"))
    jsonschema.validate(content, schema_of(TrainContent))
    assert content["finished"] and [(row["task"], row["mixer"]) for row in content["rows"]] == [
        ("recall", "pom"),
        ("recall", "linear_floor"),
    ]
