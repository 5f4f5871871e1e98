"""Forecasts: windows that never see the future, the instance norm, what is missing, scores, controls, hosts, predictions."""

import json

import numpy
import pytest
import torch

from polymix.domains.timeseries import data
from polymix.domains.timeseries.recipe import TimeseriesRecipe
from polymix.domains.timeseries.task import TimeseriesTask
from polymix.errors import DataError, OptionError
from polymix.train.data.problems import Problems
from polymix.train.data.series import baselines, controls
from polymix.train.data.series import parts as parts_of
from polymix.train.data.series.files import read
from polymix.train.data.series.scores import scores
from polymix.train.data.series.synthetic import write_lead
from polymix.train.data.series.times import Series
from polymix.train.data.series.windows import Window
from polymix.train.run import check_recipe, train
from polymix.train.saved import SavedRun

TINY = TimeseriesRecipe.tiny().changed(control=False)


def cut(recipe, *series):
    return parts_of.cut(data.form_of(recipe), series, "series")


def ramp(length, variables=("a",), **options):
    steps = numpy.arange(length, dtype=float)[:, None] + 1000 * numpy.arange(len(variables))
    return Series("ramp", steps, variables, **options)


def inputs(recipe, variables=1, seed=0):
    draw = torch.Generator().manual_seed(seed)
    past = torch.randn(2, variables, recipe.context, generator=draw, dtype=torch.float64)
    dates = torch.randn(2, recipe.context + recipe.horizon, 6, generator=draw, dtype=torch.float64)
    return past, torch.ones_like(past, dtype=torch.bool), dates


def built(**options):
    torch.manual_seed(0)
    recipe = TINY.changed(**options)
    return recipe, TimeseriesTask(recipe)._build(3).double().eval()


def test_the_parts_follow_in_time_and_share_no_future():
    parts = cut(TINY, ramp(200))
    futures = [{step for _, start in windows.places for step in range(start, start + 12)}
               for windows in (parts.train, parts.validation, parts.test)]  # fmt: skip
    assert max(futures[0]) < min(futures[1]) <= max(futures[1]) < min(futures[2]) and max(futures[2]) < 200


def test_a_window_is_the_past_and_what_follows_it():
    parts = cut(TINY, ramp(200))
    values, observed, dates, _ = parts.train[0]
    one = parts.train.series[0]
    start = parts.train.places[0][1]
    raw = values[0] * float(one.spread[0]) + float(one.centre[0])
    assert torch.allclose(raw, torch.arange(start - 32, start + 12).float(), atol=1e-3) and observed.all()
    assert dates.shape == (44, 6)


def test_series_of_different_lengths_are_padded_on_the_left_and_marked():
    parts = cut(TINY, ramp(50), ramp(300))
    short = next(place for place, (which, _) in enumerate(parts.test.places) if which == 0)
    _, observed, _, _ = parts.test[short]
    start = parts.test.places[short][1]
    assert observed[0].tolist() == [step >= 32 - start for step in range(44)]
    with pytest.raises(DataError, match="too short"):
        cut(TINY, ramp(30))


def test_scale_is_the_seasonal_naive_error_of_the_training_part():
    parts = cut(TINY.changed(season=5), ramp(200))
    one = parts.test.series[0]
    assert torch.allclose(one.scale * torch.tensor(one.spread).float(), torch.tensor([5.0]))
    assert cut(TINY, Series("flat", numpy.ones((200, 1)), ("a",))).test[0].scale.isnan().all(), "no error to divide by"


@pytest.mark.parametrize("options", [
    {}, {"head": "flat"}, {"host": "inverted"}, {"mixer": "dlinear"}, {"mixer": "softmax"}, {"mixer": "poly_sa"},
    {"horizon": 20}, {"mixer": "pom"}, {"criterion": "squared"},
])  # fmt: skip
def test_level_and_unit_of_the_past_return_on_the_forecast(options):
    recipe, model = built(**options)
    past, observed, dates = inputs(recipe, 3)
    output = model(past, observed, dates)
    assert output.shape == (2, 3, recipe.horizon, 1 if recipe.criterion == "squared" else 9)
    assert torch.allclose(model(7 * past + 100, observed, dates), 7 * output + 100)


@pytest.mark.parametrize("options", [{}, {"head": "flat"}, {"host": "inverted"}, {"mixer": "dlinear"}])
def test_what_was_not_observed_changes_nothing(options):
    recipe, model = built(**options)
    past, observed, dates = inputs(recipe, 3)
    observed[..., 5:9] = False
    other = torch.where(observed, past, torch.full_like(past, 1e6))
    assert torch.equal(model(past, observed, dates), model(other, observed, dates))
    assert not torch.allclose(model(past, observed, dates), model(past, torch.ones_like(observed), dates))


def test_with_the_query_head_the_floor_sees_the_past_by_its_level_alone():
    recipe, model = built(mixer="linear_floor")
    past, observed, dates = inputs(recipe)
    again = past.flip(-1)  # the same mean and width
    assert torch.allclose(model(past, observed, dates), model(again, observed, dates))
    recipe, model = built(mixer="softmax")
    assert not torch.allclose(model(past, observed, dates), model(again, observed, dates))


def test_the_host_inverted_mixes_variables_and_the_host_patch_does_not():
    for host, mixes in (("patch", False), ("inverted", True)):
        recipe, model = built(host=host, mixer="softmax")
        past, observed, dates = inputs(recipe, 3)
        other = past.clone()
        other[:, 2] = other[:, 2].flip(-1)
        same = torch.allclose(model(past, observed, dates)[:, 0], model(other, observed, dates)[:, 0], atol=1e-12)
        assert same != mixes


def test_scores_by_hand():
    window = Window(torch.tensor([[[0.0, 1.0, 2.0, 9.0]]]), torch.tensor([[[True, True, True, False]]]), torch.zeros(1, 4, 6),
                    torch.tensor([[2.0]]))  # fmt: skip
    levels = torch.tensor([0.0, 0, 0, 0, 0, 0, 0, 0, 1.5])
    result = scores(levels.expand(1, 1, 2, 9), window._replace(observed=window.observed))
    assert result["mae"] == 2.0 and result["mase"] == 1.0 and result["mse"] == 4.0, "the last was not observed"
    assert result["coverage_error"] == pytest.approx(0.8)
    pinball = (sum(level * 2.0 for level in numpy.arange(1, 9) / 10) + 0.9 * 0.5) / 9
    assert result["crps"] == pytest.approx(2 * pinball / 2)
    point = scores(torch.zeros(1, 1, 2, 1), window)
    assert point["crps"] == point["mase"] and "coverage_error" not in point


def test_naive_and_seasonal_naive_take_the_last_that_was_observed():
    past = torch.tensor([1.0, 2, 3, 4, 5, 6, 7])
    seen = torch.tensor([True, True, True, True, True, False, True])
    assert baselines.naive(past, seen, 3).tolist() == [7, 7, 7]
    assert baselines.naive(past, seen, 4, 3).tolist() == [5, 3, 7, 5]
    assert baselines.naive(past, seen, 2, 9).tolist() == [7, 7]


def test_smoothing_is_its_recursion():
    draw = torch.Generator().manual_seed(0)
    past = torch.randn(24, generator=draw) + torch.tensor([0.0, 5, -5, 2]).repeat(6)
    seen = torch.rand(24, generator=draw) > 0.2
    best = None
    for alpha in baselines.LEVEL_RATES:
        for gamma in baselines.SEASON_RATES:
            start, known = past[:8], seen[:8]
            level, squares = float(start[known].mean()), 0.0
            cycle = [
                float(((start - level) * known)[place::4].sum() / max(1, int(known[place::4].sum())))
                for place in range(4)
            ]
            for step in range(24):
                error = (float(past[step]) - level - cycle[step % 4]) * float(seen[step])
                level, squares = level + alpha * error, squares + error**2
                cycle[step % 4] += gamma * error
            if best is None or squares < best[0]:
                best = squares, [level + cycle[(24 + step) % 4] for step in range(6)]
    assert torch.allclose(baselines.smoothing(past[None], seen[None], 6, 4)[0], torch.tensor(best[1]), atol=1e-4)


def test_the_linear_control_finds_a_linear_law():
    steps = numpy.arange(400)
    wave = numpy.sin(2 * numpy.pi * steps / 13)[:, None]
    parts = cut(TINY, Series("wave", wave, ("a",)))
    window = parts.test.batch(range(16))
    assert (controls.linear(parts.train, parts.validation, window) - window.values[..., 32:]).abs().max() < 0.02


def test_targets_alone_are_learnt_and_scored():
    recipe = TINY.changed(host="inverted", targets=("b",))
    parts = cut(recipe, ramp(200, ("a", "b")))
    assert not parts.train[0].observed[0, 32:].any() and parts.train[0].observed[1].all()
    assert cut(TINY.changed(targets=("b",)), ramp(200, ("a", "b"))).train.series[0].series.variables == ("b",)
    with pytest.raises(OptionError, match="targets"):
        cut(TINY.changed(targets=("c",)), ramp(200))


def test_followers_are_the_sum_of_their_leaders(tmp_path):
    write_lead(tmp_path, 0)
    (series,) = read(str(tmp_path), None, Problems())
    leader, follower = series.values[:, :8], series.values[:, 8:]
    rest = follower[40:, 2] - 0.7 * (leader[40 - 26 : -26, 2] + leader[40 - 27 : -27, 5])
    assert abs(rest.std() - 0.1) < 0.01


@pytest.mark.parametrize(("options", "said"), [
    ({"context": 30}, "context"), ({"test_share": 0.9, "validation_share": 0.1}, "test_share"), ({"mlp_ratio": 0.01}, "mlp_ratio"),
    ({"mixer": "dlinear", "plan": "1:1"}, "plan"), ({"context": 2**30, "patch": 2}, "context"),
])  # fmt: skip
def test_options_that_cannot_be(options, said):
    with pytest.raises(OptionError, match=said):
        check_recipe(TINY.changed(**options))


@pytest.mark.draws
def test_a_run_measures_draws_and_predicts_a_csv_with_times(tmp_path):
    rows = [f"2026-01-{1 + hour // 24:02} {hour % 24:02}:00,{hour % 24},{(hour % 7) ** 2}" for hour in range(400)]
    (tmp_path / "x.csv").write_text("\n".join(["date,load,wind", *rows]))
    recipe = TINY.changed(data=str(tmp_path / "x.csv"))
    last = train(recipe, tmp_path / "run")
    names = {
        "mase",
        "crps",
        "mae",
        "mse",
        "coverage_error",
        "mase_naive",
        "mase_seasonal",
        "mase_linear",
        "mase_smoothing",
    }
    assert names <= set(last) and (tmp_path / "run" / "forecasts.png").is_file()
    saved = SavedRun.of(tmp_path / "run")
    assert saved.measure()["metrics"]["mase"] == pytest.approx(last["mase"])
    assert saved.measure(str(tmp_path / "x.csv"), limit=3)["count"] == 3
    (row,) = saved.predict([tmp_path / "x.csv"], tmp_path / "seen")
    assert (tmp_path / "seen" / row["picture"]).is_file()
    part = json.loads((tmp_path / "seen" / "predictions.json").read_text())["results"][0]["forecasts"]["x, load"]
    assert part["times"][0] == "2026-01-17T16:00:00" and len(part["median"]) == 12
    assert all(
        low <= median <= high for low, median, high in zip(part["low"], part["median"], part["high"], strict=True)
    )
    numbers = ",".join(map(str, range(40)))
    (tmp_path / "twice.tsf").write_text(f"@attribute series_name string\n@data\nT:{numbers}\nT:{numbers}\n")
    years = "".join(f"{year}-01-01,{year % 7}\n" for year in range(9900, 10000))
    (tmp_path / "far.csv").write_text(f"date,a\n{years}")  # matplotlib draws no date after 9999
    twice, far = saved.predict([tmp_path / "twice.tsf", tmp_path / "far.csv"], tmp_path / "odd")
    assert len(twice["forecasts"]) == 2, "a series hid another one of its name"
    assert far["forecasts"]["far, a"]["times"][0].startswith("10000")
    (tmp_path / "empty.csv").write_text("")
    with pytest.raises(DataError, match=r"empty\.csv"):
        saved.predict([tmp_path / "empty.csv"], tmp_path / "seen")


def test_a_model_of_variables_refuses_others(tmp_path):
    for name, head in (("x", "date,a,b"), ("y", "date,a,c")):
        rows = [f"2026-01-{1 + hour // 24:02} {hour % 24:02}:00,{hour % 24},{hour % 7}" for hour in range(300)]
        (tmp_path / f"{name}.csv").write_text("\n".join([head, *rows]))
    train(TINY.changed(data=str(tmp_path / "x.csv"), host="inverted"), tmp_path / "run")
    saved = SavedRun.of(tmp_path / "run")
    for use in (
        lambda: saved.predict([tmp_path / "y.csv"], tmp_path / "seen"),
        lambda: saved.measure(str(tmp_path / "y.csv")),
    ):
        with pytest.raises(DataError, match="variables"):
            use()
