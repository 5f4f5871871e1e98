"""Depth: the rooms' true depth by geometry, the loss and the metrics by their definitions, hosts, views, predictions."""

import json
import math

import numpy
import pytest
import torch

from polymix.domains.depth import data, hosts, metrics, synthetic
from polymix.domains.depth.recipe import DepthRecipe
from polymix.domains.depth.task import DepthTask, scale_invariant
from polymix.errors import DataError, OptionError, ShapeError
from polymix.train.data.cameras import directions
from polymix.train.run import check_recipe, train
from polymix.train.saved import SavedRun

TINY = DepthRecipe.tiny().changed(control=False)


def rooms(count=6, cameras=2, seed=0):
    return synthetic.draw_rooms(count, cameras, torch.Generator().manual_seed(seed))


def back(rooms, camera, depth):
    """The places (n, H · W, 3) in the room that a camera's depths stand for."""
    height, width = depth.shape[1:]
    rays = directions(synthetic.lens(height, width), height, width)
    pose = rooms.poses[:, camera]
    return (rays * depth.flatten(1)[..., None]) @ pose[:, :3, :3].transpose(1, 2) + pose[:, None, :3, 3]


@pytest.mark.parametrize("camera", [0, 1])
def test_every_depth_leads_to_a_surface_of_the_room(camera):
    """A wall, the floor, the ceiling or the side of a box: no pixel is nearer or farther."""
    drawn = rooms()
    picture, depth = synthetic.render(drawn, camera, 12, 16)
    assert picture.shape == (6, 3, 12, 16) and depth.shape == (6, 12, 16) and (depth > 0).all()
    places = back(drawn, camera, depth)
    shell = torch.minimum(places.abs(), (places - drawn.size[:, None]).abs()).amin(-1)
    off = (places[:, :, None] - drawn.middles[:, None]).abs() - drawn.halves[:, None]
    sides = off.amax(-1).abs().amin(-1)
    assert torch.minimum(shell, sides).max() < 1e-4
    assert (places > -1e-4).all() and (places < drawn.size[:, None] + 1e-4).all()
    assert (sides < 1e-4).any() and (shell < 1e-4).any()


def test_cameras_stand_upright_in_the_room_and_poses_are_rotations():
    drawn = rooms(50, 3)
    turns = drawn.poses[..., :3, :3]
    torch.testing.assert_close(turns @ turns.transpose(-1, -2), torch.eye(3).expand_as(turns), atol=1e-5, rtol=0)
    assert (torch.linalg.det(turns) > 0.99).all() and (drawn.poses[..., 2, 3] == synthetic.EYE).all()
    assert (turns[..., 1] == torch.tensor([0.0, 0, -1])).all(), "down is down"


def test_the_loss_is_the_scale_invariant_one_over_what_is_known():
    """mean d² − λ (mean d)², and at λ = 1 a factor costs nothing."""
    draw = torch.Generator().manual_seed(0)
    log_depth = torch.randn(3, 2, 4, 5, generator=draw)
    truth = torch.rand(3, 2, 4, 5, generator=draw) + 0.5
    truth[0, 1] = 0
    truth[1, 0, :2] = 0
    for share in (0.0, 0.5, 0.85, 1.0):
        expected = []
        for p, t in zip(log_depth.flatten(0, 1), truth.flatten(0, 1), strict=True):
            d = (p - t.log())[t > 0]
            expected.append((d**2).mean() - share * d.mean() ** 2 if len(d) else torch.tensor(0.0))
        torch.testing.assert_close(scale_invariant(log_depth, truth, share), torch.stack(expected).mean())
    one, other = (scale_invariant(log_depth + shift, truth, 1.0) for shift in (0.0, 3.0))
    torch.testing.assert_close(one, other, atol=1e-5, rtol=0)


def test_the_metrics_are_those_of_their_definitions_and_zeros_do_not_count():
    truth = torch.tensor([[1.0, 2.0, 0.0], [4.0, 0.0, 5.0]])
    predicted = torch.tensor([[1.1, 1.0, 9.0], [4.0, 9.0, 6.0]])
    pairs = [(1.1, 1), (1, 2), (4, 4), (6, 5)]
    logs = [math.log(p / t) for p, t in pairs]
    mean = sum(logs) / 4
    expected = {
        "abs_rel": sum(abs(p - t) / t for p, t in pairs) / 4,
        "rmse": math.sqrt(sum((p - t) ** 2 for p, t in pairs) / 4),
        "delta_1": sum(max(p / t, t / p) < 1.25 for p, t in pairs) / 4,
        "si_log": math.sqrt(sum(d * d for d in logs) / 4 - mean**2),
    }
    assert metrics.scores(predicted, truth) == pytest.approx(expected, rel=1e-6)


def test_with_the_median_aligned_a_factor_changes_no_metric():
    draw = torch.Generator().manual_seed(1)
    truth, predicted = torch.rand(2, 8, 8, generator=draw) + 0.5
    truth[0, 0] = 0
    recipe = TINY.changed(align="median")
    one, other = (metrics.scores(metrics.aligned(f * predicted, truth, recipe), truth) for f in (1.0, 700.0))
    assert one == pytest.approx(other, rel=1e-5)
    assert torch.equal(metrics.aligned(predicted, truth, TINY), predicted)


def test_a_ray_is_that_of_the_tokens_middle_in_the_first_cameras_axes(tmp_path):
    """Through the depth at a token's middle, the rays of both views end at places of one room."""
    recipe = TINY.changed(cameras=2, patch=1, synthetic_train=2, synthetic_test=2)
    made = data.load(recipe, tmp_path, print)
    _, depth, rays = made.test[0]
    assert rays.shape == (2, 256, 6) and rays[0, :, :3].abs().max() < 1e-5
    drawn = rooms(2, 2, synthetic.number("rooms", "test", 0))
    places = rays[..., :3] + depth.flatten(1)[..., None] * rays[..., 3:]
    pose = drawn.poses[0, 0]
    world = places @ pose[:3, :3].T + pose[:3, 3]
    for camera in range(2):
        exact = back(drawn, camera, depth[None, camera].expand(2, -1, -1))[0]
        torch.testing.assert_close(world[camera], exact, atol=1e-4, rtol=0)


def test_views_are_mixed_and_the_control_mixes_none():
    """What one camera sees changes the depth of the other, but in linear_floor."""
    for mixer, mixes in (("softmax", True), ("pom", True), ("padre", True), ("linear_floor", False)):
        torch.manual_seed(0)
        recipe = TINY.changed(cameras=2, mixer=mixer, depth=2)
        model = hosts.build(recipe, 0.7).eval()
        views, rays = torch.randn(1, 2, 3, 16, 16), torch.randn(1, 2, 4, 6)
        with torch.no_grad():
            before = model(views, rays)
            views[:, 1] = torch.randn(1, 3, 16, 16)
            after = model(views, rays)
        assert before.shape == (1, 2, 16, 16)
        assert torch.equal(before[:, 0], after[:, 0]) is not mixes


def test_a_pixel_is_that_of_its_patch():
    """With a mixer that mixes nothing, a change of one patch changes the depth of its own pixels alone."""
    model = hosts.build(TINY.changed(mixer="linear_floor"), 0.0).eval()
    views = torch.zeros(1, 1, 3, 16, 16)
    with torch.no_grad():
        before = model(views)
        views[..., 8:, :8] = torch.randn(3, 8, 8)
        changed = (model(views) != before)[0, 0]
    assert changed[8:, :8].all() and changed.sum() == 64


@pytest.mark.parametrize(("host", "options"), [
    ("dpt", {"depth": 4, "patch": 8}), ("dpt", {"depth": 5, "patch": 16, "plan": "1:1", "match_parameters": True}),
    ("glpn", {"height": 32}), ("glpn", {"plan": "1:1", "max_depth": 10.0, "mixer": "padre"}),
])  # fmt: skip
def test_published_hosts_start_near_the_typical_depth_and_learn(host, options):
    pytest.importorskip(
        "transformers", reason="untested: DPT and GLPN, for which transformers is needed (the text extra)"
    )
    recipe = DepthRecipe(**{"host": host, "dim": 16, "depth": 1, "control": False, **options})
    torch.manual_seed(0)
    model = hosts.build(recipe, 2.0)
    log_depth = model(torch.randn(2, 1, 3, recipe.height, recipe.width))
    assert log_depth.shape == (2, 1, recipe.height, recipe.width)
    if host == "dpt":
        assert (log_depth - 2).abs().max() < 0.1
    else:
        most = math.log(10) + (2 if recipe.max_depth is None else 0)
        assert (log_depth - most - math.log(0.5)).abs().max() < 0.5 and log_depth.max() < most
    log_depth.square().mean().backward()
    assert all(p.grad is not None for p in model.parameters())


@pytest.mark.parametrize(("options", "sentence"), [
    ({"host": "dpt", "depth": 4, "cameras": 2}, "1: dpt sees one picture"), ({"host": "dpt"}, "depth=4 or more"),
    ({"host": "dpt", "depth": 4, "width": 32}, "and squares"), ({"host": "glpn", "patch": 8}, "patch=None"),
    ({"host": "glpn", "width": 40}, "a multiple of 32"), ({"height": 20}, "a multiple of 8"),
    ({"host": "glpn", "mlp_ratio": 1.5}, "a whole mlp_ratio"), ({"max_depth": 1e-4}, "more than min_depth"),
    ({"cameras": 65}, "from 1 to 64"), ({"scale_invariance": 1.5}, "from 0 to 1"),
])  # fmt: skip
def test_options_that_do_not_fit_are_refused(options, sentence):
    with pytest.raises(OptionError, match=sentence):
        check_recipe(DepthRecipe(**options))


def test_views_of_another_size_and_missing_rays_are_refused():
    with pytest.raises(ShapeError, match="Resize"):
        hosts.build(TINY, 0.0)(torch.zeros(1, 1, 3, 16, 24))
    with pytest.raises(ShapeError, match="rays"):
        hosts.build(TINY.changed(cameras=2), 0.0)(torch.zeros(1, 2, 3, 16, 16))


def test_depth_that_cannot_be_measured_is_refused():
    task, views = DepthTask(TINY), torch.zeros(1, 3, 16, 16, dtype=torch.uint8)
    nothing = data.Scenes((), TINY)
    nothing.scenes = [()]
    nothing.decoded = {0: (views, torch.zeros(1, 16, 16), torch.zeros(1, 0, 6))}
    with pytest.raises(DataError, match="true depth"):
        task.measure(hosts.build(TINY, 0.0), data.DepthData("none", 0.0, nothing, nothing), metrics.Process())


@pytest.mark.parametrize("cameras", [1, 2])
def test_a_run_measures_predicts_and_draws(cameras, tmp_path, capsys):
    pytest.importorskip("plotly", reason="untested: pages that turn, for which plotly is needed (the scans extra)")
    recipe = TINY.changed(cameras=cameras, align="median", max_depth=20.0, mixer="softmax")
    train(recipe, tmp_path / "run", data_folder=tmp_path / "data")
    content = json.loads((tmp_path / "run" / "results.json").read_text())
    assert set(content["rows"][0]["metrics"]) == {"abs_rel", "delta_1", "rmse", "si_log"}
    assert all(math.isfinite(value) for value in content["rows"][0]["metrics"].values())
    assert (tmp_path / "run" / "cloud.html").is_file() and (tmp_path / "run" / "depth.png").is_file()
    test = next((tmp_path / "data").glob("rooms-*")) / "test"
    run = SavedRun.of(tmp_path / "run")
    file = test / "images" / "00000" / "0.png"
    if cameras == 2:
        file = tmp_path / "scene"
        for kind in ("images", "poses"):
            (file / kind).mkdir(parents=True)
            for path in sorted((test / kind / "00000").iterdir()):
                (file / kind / path.name).write_bytes(path.read_bytes())
        (file / "intrinsics.txt").write_bytes((test / "intrinsics.txt").read_bytes())
    (row,) = run.predict([file], tmp_path / "seen")
    depth = numpy.load(tmp_path / "seen" / row["depth"])
    assert depth.dtype == numpy.float32 and depth.shape == ((16, 16) if cameras == 1 else (2, 16, 16))
    assert row["nearest"] == pytest.approx(depth.min()) and row["nearest"] <= row["median"] <= row["farthest"]
    assert {row["picture"], row["page"]} <= {path.name for path in (tmp_path / "seen").iterdir()}


def test_a_prediction_lies_in_the_middle_of_a_wider_picture(tmp_path):
    from PIL import Image

    pytest.importorskip("plotly", reason="untested: pages that turn, for which plotly is needed (the scans extra)")
    Image.new("RGB", (40, 20), "red").save(tmp_path / "wide.png")
    (tmp_path / "seen").mkdir()
    model = hosts.build(TINY, 1.0).eval()
    with torch.no_grad():
        (row,) = DepthTask(TINY).predict(model, None, [tmp_path / "wide.png"], tmp_path / "seen", metrics.Process())
    depth = numpy.load(tmp_path / "seen" / row["depth"])
    assert depth.shape == (20, 40) and (depth[:, 10:30] > 0).all()
    assert (depth[:, :10] == 0).all() and (depth[:, 30:] == 0).all()


def test_the_cloud_is_the_scene_and_its_colours_are_the_pictures():
    drawn = rooms(1, 1)
    picture, depth = synthetic.render(drawn, 0, 16, 16)
    view = data.View("a", "b", "")
    cloud = metrics.cloud_of({"picture": picture[0], "truth": depth[0], "prediction": 2 * depth[0]}, view, TINY)
    assert list(cloud.colourings) == ["prediction", "truth"] and len(cloud.points) == 512
    one, other = (cloud.points[cloud.colourings["truth"].classes == k] for k in (0, 1))
    numpy.testing.assert_allclose(one, 2 * other, rtol=1e-5)
    numpy.testing.assert_allclose(other[:, 1], depth.flatten(), rtol=1e-5)
    assert other[0, 2] > 0 > other[-1, 2] and other[0, 0] < 0 < other[-1, 0], "up and to the right"
    assert (cloud.colours[:256] == picture[0].flatten(1).T.numpy()).all()


def test_matched_mixers_have_the_parameters_of_glpns_own_attention(monkeypatch):
    """Which has a convolution before its keys, so that softmax in its place is smaller."""
    pytest.importorskip("transformers", reason="untested: GLPN, for which transformers is needed (the text extra)")

    def count(**options):
        return sum(
            p.numel() for p in hosts.build(DepthRecipe(host="glpn", dim=32, depth=1, **options), 0.0).parameters()
        )

    plain, matched = (count(match_parameters=match) for match in (False, True))
    monkeypatch.setattr(hosts, "put_mixers", lambda *parts: None)
    theirs = count()
    assert abs(matched - theirs) < 0.02 * theirs and abs(matched - theirs) < abs(plain - theirs)
