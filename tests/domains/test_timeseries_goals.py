"""Anomalies and classes of series: labels, scores by hand, thresholds, readers of UCR's files, whole runs, combinations."""

import json

import numpy
import pytest
import torch

from polymix.domains.timeseries import data
from polymix.domains.timeseries.hosts import Classifier
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.domains.timeseries.task import TimeseriesTask
from polymix.errors import DataError, OptionError
from polymix.mixers.spec import parse_mixer
from polymix.train.data.problems import Problems
from polymix.train.data.series import anomalies, parts, synthetic
from polymix.train.data.series.archives import read_classes, read_rows
from polymix.train.data.series.classes import prepared
from polymix.train.data.series.files import read
from polymix.train.data.series.tables import read_table, with_labels
from polymix.train.data.series.times import Series
from polymix.train.evaluation import Selection
from polymix.train.registry import task_class
from polymix.train.run import check_recipe, train
from polymix.train.saved import SavedRun
from polymix.train.task import Process

TINY = TimeseriesRecipe.tiny().changed(control=False)
ANOMALIES, CLASSES = (TINY.changed(goal=goal) for goal in ("anomalies", "classes"))


def wave(length, first, last, variables=1):
    values = numpy.sin(numpy.arange(length)[:, None] * 0.5 + numpy.arange(variables))
    labels = numpy.zeros(length)
    labels[first:last] = 1
    values[first:last] += 3
    return Series("wave", values, tuple("abcdefg"[:variables]), labels=labels)


def cut(recipe, *series):
    return parts.cut(data.form_of(recipe), series, "series")


def written(path, series, head="a,anomaly"):
    rows = zip(*series.values.T, series.labels.astype(int), strict=True)
    path.write_text("\n".join([head, *(",".join(f"{value:g}" for value in row) for row in rows)]))
    return str(path)


def test_scores_of_anomalies_by_hand():
    scores, labels = torch.tensor([0.1, 0.9, 0.2, 0.3, 0.8, 0.4]), torch.tensor([0.0, 0, 1, 1, 0, 1])
    result = anomalies.quality([(scores, labels)], 0.35)
    assert result["auc"] == pytest.approx(3 / 9), "of nine pairs three are in order"
    assert result["f1"] == pytest.approx(2 * 1 / (3 + 3))
    assert anomalies.point_adjusted(scores, labels).tolist() == pytest.approx([0.1, 0.9, 0.3, 0.3, 0.8, 0.4])
    assert result["f1_best"] == pytest.approx(2 * 3 / (5 + 3)) and result["f1_adjusted"] == pytest.approx(0.75)
    assert anomalies.quality([(scores, torch.zeros(6))]) == {}, "without anomalies nothing is measured"
    missing = torch.cat((scores, torch.tensor([torch.nan])))
    assert anomalies.quality([(missing, torch.cat((labels, torch.ones(1))))]) == anomalies.quality([(scores, labels)])


def test_point_adjusting_flatters_scores_that_know_nothing():
    """The reason why the plain F1 stands beside it."""
    labels = torch.zeros(2000)
    labels[500:700] = 1
    chance = anomalies.quality(anomalies.by_chance([labels]))
    assert chance["f1_best"] < 0.25 and chance["f1_adjusted"] > 0.9 and abs(chance["auc"] - 0.5) < 0.05


def test_moving_means_leave_out_what_was_not_observed():
    values = torch.tensor([1.0, 2, torch.nan, 4, 9])
    assert anomalies.moving_mean(values, 3).tolist() == pytest.approx([1.5, 1.5, torch.nan, 6.5, 6.5], nan_ok=True)
    assert torch.equal(anomalies.moving_mean(values.nan_to_num(), 1), values.nan_to_num())
    assert anomalies.runs(torch.tensor([True, True, False, True])) == [(0, 2), (3, 4)]


def test_each_step_of_the_test_is_forecast_once_and_the_last_ones_too():
    recipe = ANOMALIES.changed(windows=None)
    windows = cut(recipe, wave(203, 190, 195, 2)).test
    errors = torch.arange(len(windows) * 12.0).reshape(-1, 1, 12)
    steps = 203 - windows.places[0][1]
    first, second = errors.flatten()[: len(errors) * 6].split(len(errors) * 6)[0], errors.flatten()[len(errors) * 6 :]
    ((scores, labels),) = anomalies.scored(windows, errors, 1)
    assert len(scores) == len(labels) == steps and labels.sum() == 5
    assert torch.equal(scores, (first[:steps] + second[:steps]) / 2), "the mean of both variables"


def test_a_limit_keeps_whole_series():
    """Half an anomaly would be another one."""
    series = [wave(200, 190, 195) for _ in range(9)]
    test = cut(ANOMALIES.changed(windows=8), *series).test
    by_series = {which: [start for other, start in test.places if other == which] for which, _ in test.places}
    assert 1 < len(by_series) < 9 and all(len(starts) == 4 for starts in by_series.values())


def test_labels_are_a_column_or_the_name_of_a_file_of_ucr(tmp_path):
    (tmp_path / "001_UCR_Anomaly_x_50_61_70.txt").write_text(" ".join(map(str, range(100))))
    problems = Problems()
    (series,) = read(str(tmp_path), None, problems)
    assert not problems and series.ends == (40, 50) and numpy.flatnonzero(series.labels).tolist() == [*range(60, 70)]
    table = with_labels(Series("x", numpy.array([[1.0, 0], [2, 1], [3, numpy.nan]]), ("a", "Is_Anomaly")))
    assert table.variables == ("a",) and table.labels.tolist() == [0, 1, 0]
    (tmp_path / "001_UCR_Anomaly_x_50_61_70.txt").write_text("1 2 x")
    assert read_table(tmp_path / "001_UCR_Anomaly_x_50_61_70.txt", problems) is None and "'x'" in problems.lines[0]
    (tmp_path / "001_UCR_Anomaly_x_50_61_70.txt").write_text("1 2 3")
    assert (
        read_table(tmp_path / "001_UCR_Anomaly_x_50_61_70.txt", problems) is None and "3 numbers" in problems.lines[1]
    )


@pytest.mark.parametrize(("series", "head", "said"), [
    (wave(200, 190, 195), "a,b", "does not say which steps are anomalies"), (wave(200, 0, 0), "a,label", "every step or none"),
    (wave(200, 10, 20), "a,label", "every step or none"),
])  # fmt: skip
def test_data_in_which_nothing_can_be_found_are_refused_and_named_by_check(series, head, said, tmp_path):
    source = written(tmp_path / "x.csv", series, head)
    with pytest.raises(DataError, match=said):
        data.load(ANOMALIES.changed(data=source), tmp_path, print)
    (line,) = data.list_problems(ANOMALIES, source)
    assert said in line


@pytest.mark.parametrize("host", ["patch", "inverted"])
def test_a_run_finds_an_anomaly_sets_its_threshold_and_predicts(host, tmp_path):
    source = written(tmp_path / "x.csv", wave(600, 560, 572, 2), "a,b,anomaly")
    recipe = ANOMALIES.changed(data=source, host=host, mixer="padre", steps=60, alarm=0.1, smooth=3)
    last = train(recipe, tmp_path / "run")
    names = {f"auc_{name}" for name in ("naive", "seasonal", "smoothing", "linear", "level")}
    assert {"auc", "f1", "f1_best", "f1_adjusted", "f1_adjusted_chance", "mae", *names} <= set(last)
    assert last["auc"] > 0.9 and last["auc_linear"] > 0.9
    saved = SavedRun.of(tmp_path / "run")
    task, model = saved.task, saved.load()
    windows = task.load(tmp_path).validation
    with torch.no_grad():
        errors = task._errors(model, windows, Process())
    above = torch.cat([scores > model.threshold for scores, _ in anomalies.scored(windows, errors, 3)])
    assert above.float().mean() == pytest.approx(0.1, abs=0.02)
    assert saved.measure(source)["metrics"]["auc"] == pytest.approx(last["auc"])
    (row,) = saved.predict([tmp_path / "x.csv"], tmp_path / "seen")
    found = json.loads((tmp_path / "seen" / "predictions.json").read_text())["results"][0]["anomalies"]["x"]
    assert any(run["first"] < 572 and run["last"] >= 560 for run in found)
    assert (tmp_path / "seen" / row["picture"]).is_file()


def test_the_weights_kept_are_those_of_the_best_forecasts():
    """The validation part need not have anomalies, by which the headline could choose."""
    task = task_class(ANOMALIES)(ANOMALIES)
    selection = Selection(task, cut(ANOMALIES, wave(200, 190, 195)), None)
    for step, error in ((1, 2.0), (2, 1.0), (3, 3.0)):
        selection.take(torch.nn.Linear(1, 1), {"mae": error}, step)
    assert selection.kept["step"] == 2


def test_negated_stretches_cannot_be_seen_in_the_values_alone(tmp_path):
    synthetic.write_mirrored(tmp_path, 0, 40, 400)
    series = read(str(tmp_path), None, Problems())
    marked = [(torch.from_numpy(numpy.abs(one.values[:, 0])), torch.from_numpy(one.labels)) for one in series]
    assert abs(anomalies.quality(marked)["auc"] - 0.5) < 0.1, "their level gives them away"


def test_classes_come_from_pairs_of_files_in_either_format(tmp_path):
    problems = Problems()
    (tmp_path / "x_TRAIN.ts").write_text("@classLabel true a b\n@data\n1,2:a\n3,4,5:b\n")
    (tmp_path / "x_TEST.ts").write_text("@classLabel true a b\n@data\n1,2:b\n")
    for source in (tmp_path, tmp_path / "x_TRAIN.ts", tmp_path / "x_TEST.ts"):
        train_rows, test_rows = read_classes(str(source), problems)
        assert not problems and [label for _, label in train_rows] == ["a", "b"] and len(test_rows) == 1
    (tmp_path / "y.tsv").write_text("1\t0.5\t2\tNaN\n-1.0e0 3 4 5\n")
    rows = read_rows(tmp_path / "y.tsv", problems)
    assert [(label, len(values)) for values, label in rows] == [("1", 2), ("-1", 3)], "NaN at the end is no step"
    (tmp_path / "y.tsv").write_text("one\t1\n")
    assert not read_rows(tmp_path / "y.tsv", problems) and "line 1" in problems.lines[0]
    (tmp_path / "z_TRAIN.ts").write_text("@classLabel true a b\n@data\n1,2:a\n3,4:b\n")
    with pytest.raises(DataError, match="2 data sets"):
        read_classes(str(tmp_path), problems)
    with pytest.raises(DataError, match="does not exist"):
        read_classes(str(tmp_path / "none"), problems)


def rows_of(*labels, variables=1, steps=5):
    return [
        (numpy.random.default_rng(place).normal(size=(steps, variables)), label) for place, label in enumerate(labels)
    ]


def test_series_of_classes_are_standardised_and_padded_in_front():
    long, short = rows_of("a", "b", steps=9)[0], rows_of("b", "a", steps=3)[0]
    both = prepared("x", [long, short], [long], 4, (0.0, 0.2))
    _, observed, label = both.train[1]
    assert both.length == 12 and observed[0].tolist() == [False] * 9 + [True] * 3 and label == 1
    known = torch.cat([values[0][observed[0]] for values, observed, _ in both.train])
    assert known.mean().abs() < 1e-6 and known.std(correction=0) == pytest.approx(1)


@pytest.mark.parametrize(("train_rows", "test_rows", "said"), [
    (rows_of("a", "a"), rows_of("a"), "1 class"), (rows_of("a", "b"), rows_of("c"), "class c"),
    (rows_of("a", "b"), rows_of("a", variables=2), "2 variables"),
])  # fmt: skip
def test_classes_that_do_not_fit_are_refused(train_rows, test_rows, said):
    with pytest.raises(DataError, match=said):
        prepared("x", train_rows, test_rows, 4, (0.0, 0.2))


def test_no_patch_has_a_part_of_marker_and_shape_and_the_floor_counts_alone(tmp_path):
    """Else one token would know the class, and the control with it."""
    synthetic.write_marked(tmp_path, 0, 20, 4)
    train_rows, test_rows = read_classes(str(tmp_path), Problems())
    assert len(train_rows) == 20 and {label for _, label in (*train_rows, *test_rows)} == {"1", "2", "3", "4"}
    for values, _ in train_rows:
        loud = numpy.flatnonzero(numpy.abs(values[:, 0]) > 1.2)
        turns = [place for place in loud[1:] if values[place, 0] * values[place - 1, 0] < -1.5]  # of the marker alone
        after = next(place for place in loud if place > max(turns) + 3)
        assert after - max(turns) >= 24
    torch.manual_seed(0)
    task = task_class(CLASSES)(CLASSES.changed(mixer="linear_floor"))
    model = task._build(1, 32, 4).double().eval()
    model.place.data.zero_()
    values = torch.randn(2, 1, 32, dtype=torch.float64)
    seen = torch.ones(2, 1, 32, dtype=torch.bool)
    turned = values.unflatten(-1, (4, 8)).flip(2).flatten(2)
    assert torch.allclose(model(values, seen), model(turned, seen)), "the order of patches says something to the floor"


@pytest.mark.parametrize("host", ["patch", "inverted"])
def test_what_was_not_observed_tells_no_class(host):
    torch.manual_seed(0)
    model = Classifier(CLASSES.changed(host=host), [parse_mixer("padre")[1]], 3, 32, 4).double().eval()
    values, observed = torch.randn(2, 3, 32, dtype=torch.float64), torch.ones(2, 3, 32, dtype=torch.bool)
    observed[..., :16] = False
    values = values.where(observed, 0.0)  # as ClassData gives them
    assert model(values, observed).shape == (2, 4) and model(values, observed).isfinite().all()
    assert not torch.allclose(model(values, observed), model(values, torch.ones_like(observed)))


def test_a_run_tells_classes_and_predicts_each_kind_of_file(tmp_path):
    recipe = CLASSES.changed(synthetic_series=40, mixer="padre")
    last = train(recipe, tmp_path / "run", data_folder=tmp_path / "data")
    assert {"accuracy", "val_loss", "accuracy_majority", "accuracy_nearest", "accuracy_linear"} <= set(last)
    saved = SavedRun.of(tmp_path / "run")
    (file,) = (tmp_path / "data").rglob("*_TEST.ts")
    (row,) = saved.predict([file], tmp_path / "seen")
    assert row["label"] in "1234" and (tmp_path / "seen" / row["picture"]).is_file()
    measured = saved.measure(str(file.parent), limit=3)
    assert measured["count"] == 3 and len(measured["labels"]) == 3
    assert saved.measure(str(file.parent), whole=True)["count"] == 50
    (tmp_path / "one.csv").write_text("\n".join(["a", *map(str, range(20))]))
    (row,) = saved.predict([tmp_path / "one.csv"], tmp_path / "seen")
    assert len(row["series"]) == 1
    (tmp_path / "long.csv").write_text("\n".join(["a", *map(str, range(300))]))
    with pytest.raises(DataError, match="300 steps"):
        saved.predict([tmp_path / "long.csv"], tmp_path / "seen")


@pytest.mark.parametrize(("options", "said"), [
    ({"goal": "classes", "mixer": "dlinear"}, "DLinear"), ({"goal": "classes", "synthetic": "lead"}, "synthetic"),
    ({"goal": "anomalies", "synthetic": "lead"}, "synthetic"), ({"goal": "classes", "validation_share": 0.0}, "keep"),
])  # fmt: skip
def test_options_of_a_goal_that_cannot_be(options, said):
    with pytest.raises(OptionError, match=said):
        check_recipe(TINY.changed(**options))


@pytest.mark.parametrize(("host", "criterion", "context", "horizon", "patch", "options"), [
    ("patch", "quantiles", 96, 96, 8, {}), ("patch", "absolute", 336, 720, 16, {"head": "flat"}),
    ("patch", "squared", 8192, 96, 64, {}), ("inverted", "quantiles", 336, 192, 16, {"targets": ("b",)}),
    ("inverted", "absolute", 96, 720, 16, {}), ("inverted", "squared", 8192, 336, 64, {}),
    pytest.param("patch", "quantiles", 8192, 720, 64, {"mixer": "dlinear"}, marks=pytest.mark.slow), ("patch", "quantiles", 96, 336, 8, {"goal": "anomalies"}),
])  # fmt: skip
def test_losses_hosts_horizons_contexts_gaps_and_lengths_go_together(host, criterion, context, horizon, patch, options):
    """Series of two lengths, on a clock, with missing values, one of them shorter than the context."""
    sizes = {"context": context, "horizon": horizon}
    sizes |= {"patch": patch} if host == "patch" and options.get("mixer") != "dlinear" else {}
    recipe = TINY.changed(host=host, criterion=criterion, **sizes, **{"mixer": "padre", **options})
    draw, series = numpy.random.default_rng(0), []
    for length in (4 * horizon, context + 8 * horizon):
        values = draw.normal(size=(length, 2)).cumsum(0)
        values[draw.random(values.shape) < 0.2] = numpy.nan
        labels = (numpy.arange(length) > length - 5).astype(float) if recipe.goal == "anomalies" else None
        start, step = numpy.datetime64("2026-01-01T00", "s"), numpy.timedelta64(3600, "s")
        series.append(Series("x", values, ("a", "b"), start, step, labels=labels))
    windows = cut(recipe, *series)
    task = task_class(recipe)(recipe)
    model = task.build(windows)
    batch = windows.train.batch([0, len(windows.train) - 1])
    loss = task.loss(model, batch)
    loss.backward()
    assert loss.isfinite() and all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())
    assert {which for which, _ in windows.test.places} >= {0, len(windows.test.series) - 1}, "a length is left out"
    outputs = 9 if criterion == "quantiles" else 1
    assert task.infer(model, batch).shape == (2, 1 if host == "patch" else 2, horizon, outputs)
    assert isinstance(task, TimeseriesTask)


@pytest.mark.parametrize(("options", "knows"), [({}, True), ({"head": "flat"}, True), ({"host": "inverted"}, True),
                                                 ({"mixer": "dlinear"}, False)])  # fmt: skip
def test_the_calendar_is_a_covariate_of_all_hosts_but_dlinear(options, knows):
    torch.manual_seed(0)
    recipe = TINY.changed(mixer="padre").changed(**options)
    model = TimeseriesTask(recipe)._build(3).eval()
    past, dates = torch.randn(2, 3, 32), torch.randn(2, 44, 6)
    outputs = [model(past, torch.ones_like(past, dtype=torch.bool), when) for when in (dates, -dates)]
    assert torch.equal(*outputs) != knows


@pytest.mark.parametrize(("text", "said"), [
    ("date\n2026-01-01\n2026-01-02\n", "no columns of numbers"), ("timestamp,a\n1,2\n2,3\n4,5\n", "line 4.*steps of one length"),
    ("date,a\n2026-01-01 00:00:00.1,1\n2026-01-01 00:00:00.2,1\n", "line 3.*less than a second"),
    ("timestamp,a\n3,2\n2,3\n1,5\n", "line 3.*steps of one length"),
])  # fmt: skip
def test_one_column_of_times_and_numbers_that_are_no_clock(text, said, tmp_path):
    (tmp_path / "x.csv").write_text(text)
    problems = Problems()
    assert read_table(tmp_path / "x.csv", problems) is None
    with pytest.raises(DataError, match=said):
        problems.settle()


def test_numbers_as_times_count_steps(tmp_path):
    (tmp_path / "x.csv").write_text("timestamp,a\n0,5\n1,6\n2,7\n")
    problems = Problems()
    series = read_table(tmp_path / "x.csv", problems)
    assert series.variables == ("a",) and series.start is None and problems.notes and not problems


def test_the_spring_hour_is_a_gap(tmp_path):
    """Where the clock is put forward, an hour of local time does not come."""
    (tmp_path / "x.csv").write_text("date,a\n2026-03-29 00:00,1\n2026-03-29 01:00,2\n2026-03-29 03:00,3\n")
    series = read_table(tmp_path / "x.csv", Problems())
    assert len(series) == 4 and numpy.isnan(series.values[2, 0])
