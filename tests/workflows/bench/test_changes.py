"""Faster and slower are said beyond the noise alone, and a regression is an exit status."""

import json

import pytest

from polymix.cli import main
from polymix.errors import OptionError, ResultsError
from polymix.workflows.bench.changes import comparability_warnings, compare
from tests.workflows.bench.content import content, row


def verdict(a, b, noise=0.05):
    return {change.row["mixer"]: change.verdict for change in compare(content(*a), content(*b), noise)}


@pytest.mark.parametrize(("b", "expected"), [
    (row(seconds=1.2), "slower"), (row(seconds=0.8), "faster"), (row(seconds=1.04, spread=0.001), "same"),
    (row(seconds=0.96, spread=0.001), "same"), (row(seconds=1.2, spread=0.3), "same"), (row(seconds=0.8, spread=0.3), "same"),
    (row(stopped="took 11 s"), "stopped"),
])  # fmt: skip
def test_verdict_needs_more_than_the_noise_and_ranges_apart(b, expected):
    assert verdict([row()], [b]) == {"pom": expected}


def test_a_machine_whose_speed_drifted_is_no_regression():
    """Floors are timed in the same turns: what happens to them as well is not the mixer's."""
    assert verdict([row(), row("qt", 2)], [row(seconds=1.3, floor=0.65), row("qt", 2.6, floor=0.65)]) == {
        "pom": "same",
        "qt": "same",
    }
    assert verdict([row(), row("qt", 2)], [row(seconds=2.6, floor=0.65), row("qt", 2.6, floor=0.65)])["pom"] == "slower"
    assert verdict([row()], [row(seconds=0.7, floor=0.35)]) == {"pom": "same"}
    assert verdict(
        [row(pass_="step", floor=1) | {"floor": None}], [row(seconds=2, floor=1, pass_="step") | {"floor": None}]
    ) == {"pom": "slower"}


def test_the_threshold_is_the_caller_s():
    assert verdict([row()], [row(seconds=1.2)], noise=0.3) == {"pom": "same"}
    with pytest.raises(OptionError, match="--noise"):
        verdict([row()], [row()], noise=-1)


def test_rows_are_matched_by_every_part_of_their_key():
    a = [row(), row(impl="eager"), row(tokens=256), row(dim=64), row(batch=2), row(dtype="bfloat16"), row(pass_="training"),
         row(threads=1)]  # fmt: skip
    slow = [{**its, "seconds": 10 * its["seconds"], "low": 9.0, "high": 11.0} for its in a]
    for i, its in enumerate(slow):
        changed = compare(content(*a), content(*a[:i], its, *a[i + 1 :]))
        assert [change.verdict for change in changed] == ["slower"] + ["same"] * (len(a) - 1)
        assert changed[0].after == its, "the row that changed must be the one that is named, and first"


def test_rows_of_one_file_alone_are_listed():
    both = verdict([row(), row("qt"), row("padre-2", stopped="no")], [row(), row("poly_sa"), row("padre-2")])
    assert both == {"pom": "same", "qt": "only in A", "poly_sa": "only in B", "padre-2": "runs again"}
    with pytest.raises(ResultsError, match="no row in common"):
        compare(content(row("qt")), content(row("pom")))


def test_another_machine_is_said():
    a, b = content(row()), content(row(floor=0.6), finished=False, cpu="another", threads=4)
    said = "\n".join(comparability_warnings(a, b))
    for text in ("a cpu in A, another in B", "threads: 2 in A, 4 in B", "B is not finished", "1.20 times as long"):
        assert text in said
    assert not comparability_warnings(a, a)


@pytest.mark.parametrize(("b", "status", "said"), [
    (content(row(seconds=2)), 1, "1 slower"), (content(row(stopped="x")), 1, "1 stopped"), (content(row()), 0, "1 same"),
    (content(row(seconds=0.5), row("qt")), 0, "1 faster, 1 only in B"), (content(row(), gpu="H200"), 0, "Warning"),
    (content(row("qt")), 2, "no row in common"), ({"schema": "polymix.compare/1"}, 2, "polymix.bench/1"), (None, 2, "b.json"),
])  # fmt: skip
def test_the_command_tells_and_ends_with_a_status(capsys, tmp_path, b, status, said):
    a_json, b_json = tmp_path / "a.json", tmp_path / "b.json"
    a_json.write_text(json.dumps(content(row())))
    if b is not None:
        b_json.write_text(json.dumps(b))
    with pytest.raises(SystemExit) as stop:
        main(["bench", "--compare", str(a_json), str(b_json)])
    out, err = capsys.readouterr()
    assert (stop.value.code or 0) == status, out + err
    assert said in " ".join((out + err).split())
    assert sorted(path.name for path in tmp_path.iterdir()) <= ["a.json", "b.json"], "it measures and writes nothing"
