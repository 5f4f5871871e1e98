"""Clips: what the last frame does not show, block-causal order, a stream with a state, next frames, scores, predictions."""

import json

import numpy
import pytest
import torch

from polymix.domains.video import data, metrics, synthetic
from polymix.domains.video.hosts import StreamState
from polymix.domains.video.recipe import VideoRecipe
from polymix.domains.video.task import VideoTask
from polymix.errors import CapabilityError, DataError, OptionError, ShapeError
from polymix.train.run import check_recipe, train
from polymix.train.saved import SavedRun

TINY = VideoRecipe.tiny().changed(control=False)


def built(channels=1, **options):
    torch.manual_seed(0)
    recipe = TINY.changed(**options)
    return VideoTask(recipe)._build(channels, 3).double().eval()


def clips(frames, channels=1, side=16, seed=0):
    draw = torch.Generator().manual_seed(seed)
    return torch.randn(2, frames, channels, side, side, generator=draw, dtype=torch.float64)


@pytest.mark.parametrize("options", [
    {}, {"depth": 3}, {"mixer": "pom:rotary=1d"}, {"mixer": "pom:reduction=sum"}, {"target": "next_frame"}, {"patch": 16},
    {"mixer": "linear_floor"}, {"patch": 4, "channels": 3},
])  # fmt: skip
def test_a_stream_read_frame_by_frame_is_the_whole_clip(options):
    """To 1e-12 in float64, beyond the frames of training too."""
    model = built(causal="frame", **options)
    x, state, outputs = clips(7, options.get("channels", 1)), None, []
    with torch.no_grad():
        whole = model(x)
        for frame in x.unbind(1):
            output, state = model.step(frame, state)
            outputs.append(output)
    assert isinstance(state, StreamState) and state.frames == 7
    assert (torch.stack(outputs, 1) - whole).abs().max() < 1e-12


def test_the_state_of_a_stream_does_not_grow():
    model = built(causal="frame")
    sizes = []
    with torch.no_grad():
        state = None
        for frame in clips(5).unbind(1):
            _, state = model.step(frame, state)
            sizes.append([part.shape for one in state.mixers for part in one])
    assert all(size == sizes[0] for size in sizes)


def test_the_sums_of_a_stream_are_float32_where_the_model_is_half():
    """A sum passes 65,504, where float16 ends, after some hundred frames."""
    model = built(causal="frame").to(torch.bfloat16)
    with torch.no_grad():
        _, state = model.step(clips(1)[:, 0].to(torch.bfloat16))
    assert {part.dtype for one in state.mixers for part in one if part.is_floating_point()} == {torch.float32}


@pytest.mark.parametrize("mixer", ["pom", "softmax", "linear_floor"])
def test_a_frame_sees_itself_and_the_frames_before_it_alone(mixer):
    model, x = built(causal="frame", mixer=mixer), clips(4)
    later = x.clone()
    later[:, 2:] += 1
    with torch.no_grad():
        one, other = model(x), model(later)
    assert torch.allclose(one[:, :2], other[:, :2], atol=1e-12) and not torch.allclose(one[:, 2:], other[:, 2:])
    earlier = x.clone()
    earlier[:, 0] += 1
    with torch.no_grad():
        sees = not torch.allclose(one[:, 3], model(earlier)[:, 3], atol=1e-9)
    assert sees == (mixer != "linear_floor")


def test_without_causal_order_the_output_is_of_the_last_frame_and_the_floor_sees_no_other():
    for mixer, sees in (("softmax", True), ("padre", True), ("pom", True), ("linear_floor", False)):
        model, x = built(mixer=mixer), clips(3)
        other = x.clone()
        other[:, :2] += 1
        with torch.no_grad():
            one, two = model(x), model(other)
        assert one.shape == (2, 1, 3) and (not torch.allclose(one, two)) == sees, mixer


def test_what_is_no_stream_is_refused():
    with pytest.raises(OptionError, match="causal"):
        built().step(clips(1)[:, 0])
    with pytest.raises(CapabilityError, match="prefill"):
        built(causal="frame", mixer="softmax").step(clips(1)[:, 0])
    with pytest.raises(OptionError, match="block-causal"):
        check_recipe(TINY.changed(causal="frame", mixer="padre"))
    with pytest.raises(ShapeError, match="clips"):
        built()(clips(3, side=8))


def test_patches_are_squares_of_the_frame_and_return_to_their_places():
    """A model whose layers do nothing but copy predicts twice the frame."""
    model = built(target="next_frame", patch=4, dim=16)
    for block in model.blocks:
        block.forward = lambda x: x
    model.norm = torch.nn.Identity()
    with torch.no_grad():
        model.embed.weight.copy_(torch.eye(16))
        model.head.weight.copy_(torch.eye(16))
        for part in (model.embed.bias, model.head.bias, model.place, model.time.weight, model.time.bias):
            part.zero_()
        x = clips(3)
        assert torch.allclose(model(x)[:, 0], 2 * x[:, -1])


@pytest.mark.parametrize("kind", synthetic.KINDS)
def test_the_last_frame_shows_no_class(kind):
    """Its mean over many clips is the same for all classes, and so is that of its products of pixels."""
    draw = torch.Generator().manual_seed(0)
    count, means, products = 1500, [], []
    for label in range(len(synthetic.KINDS[kind])):
        last = synthetic.MOVES[kind](torch.full((count,), label), 4, draw)[:, -1, ::4, ::4].flatten(1)
        means.append(last.mean(0))
        products.append(last.t() @ last / count)
    for parts in (means, products):
        assert max(float((part - parts[0]).abs().max()) for part in parts[1:]) < 0.1


def test_a_disc_moves_where_its_class_says():
    draw = torch.Generator().manual_seed(0)
    for label, axis in enumerate((3, 2, 3, 2)):
        frames = synthetic.MOVES["direction"](torch.full((1,), label), 2, draw)[None, 0]
        shifts = [float((frames[0, 0].roll(by, axis - 2) * frames[0, 1]).sum()) for by in range(-4, 5)]
        best = shifts.index(max(shifts)) - 4
        assert (best > 0) == (label < 2) and abs(best) >= 2


def test_bouncing_and_passing_differ_only_by_the_way():
    """Alike until they meet; then a bouncing shape ends where it began, and a passing one on the other side."""
    bounce, passing = (synthetic.MOVES["collision"](torch.full((1,), label), 9, torch.Generator().manual_seed(3))[0]
                       for label in (0, 1))  # fmt: skip
    assert torch.allclose(bounce[:5], passing[:5], atol=1e-5) and torch.allclose(bounce[-1], bounce[0], atol=1e-5)
    assert torch.allclose(passing[-1], passing[0].flip(-1), atol=1e-5) and not torch.allclose(passing[-1], passing[0])


def test_after_the_screen_nothing_but_the_screen_is_left():
    last = [
        synthetic.MOVES["hidden"](torch.full((50,), label), 6, torch.Generator().manual_seed(label))[:, -1]
        for label in (0, 1)
    ]
    assert torch.allclose(last[0], last[0][:1].expand_as(last[0]), atol=0.02) and torch.allclose(
        last[0], last[1], atol=0.02
    )


def arrays(folder, shape=(4, 6, 16, 16), classes=("a", "b"), seed=0):
    draw = numpy.random.default_rng(seed)
    for name in classes:
        (folder / name).mkdir(parents=True)
        numpy.save(folder / name / "clips.npy", draw.integers(0, 255, shape).astype(numpy.uint8))
    return folder


def test_a_clip_is_cut_with_its_stride_from_the_middle_or_in_training_from_anywhere(tmp_path):
    recipe = TINY.changed(data=str(arrays(tmp_path / "x", (4, 9, 16, 16))), stride=2)
    parts = data.load(recipe, tmp_path, print)
    clip, label = parts.test[0]
    video = parts.test.videos[0]
    assert clip.shape == (3, 1, 16, 16) and label == parts.test.labels[0]
    assert torch.allclose(parts.pixels(clip) * 255, video[2:7:2].float(), atol=1e-3)
    torch.manual_seed(0)
    starts = {tuple((parts.pixels(parts.train[0][0]) * 255)[:, 0, 0, 0].round().tolist()) for _ in range(50)}
    assert len(starts) == 5, "any of five starts"


def test_next_frames_are_measured_beside_the_last_one_copied(tmp_path):
    recipe = TINY.changed(target="next_frame", data=str(arrays(tmp_path / "x")))
    parts = data.load(recipe, tmp_path, print)
    assert parts.test[0][0].shape[0] == 4
    copies = metrics.measure(lambda clip: clip[:, -1:], parts, recipe, metrics.Process())
    assert copies["psnr"] == pytest.approx(copies["psnr_copy"], abs=1e-3)
    assert metrics.psnr(torch.zeros(3), torch.full((3,), 0.1)) == pytest.approx(20)


def test_with_causal_order_every_next_frame_is_learnt(tmp_path):
    draw = clips(4).float()
    losses = {}
    for causal in (None, "frame"):
        task = VideoTask(TINY.changed(target="next_frame", causal=causal))
        losses[causal] = task.loss(lambda x, causal=causal: x if causal else x[:, -1:], (draw, None)).item()
    assert losses["frame"] == pytest.approx((draw[:, 1:] - draw[:, :-1]).square().mean().item())
    assert losses[None] == pytest.approx((draw[:, 3] - draw[:, 2]).square().mean().item())


@pytest.mark.parametrize(("options", "said"), [
    ({"patch": 5}, "patch"), ({"mlp_ratio": 0.01}, "mlp_ratio"), ({"frames": 1}, "frames"),
    ({"frames": 100_000, "image_size": 4096, "patch": 8}, "frames"),
])  # fmt: skip
def test_options_that_cannot_be(options, said):
    with pytest.raises(OptionError, match=said):
        check_recipe(TINY.changed(**options))


@pytest.mark.draws
@pytest.mark.parametrize("target", ["class", "next_frame"])
def test_a_run_measures_draws_evaluates_and_predicts(target, tmp_path):
    folder = arrays(tmp_path / "x", (5, 6, 16, 16))
    last = train(TINY.changed(data=str(folder), target=target, causal="frame"), tmp_path / "run")
    assert set(last) >= ({"accuracy", "val_loss"} if target == "class" else {"psnr", "psnr_copy"})
    assert (tmp_path / "run" / "samples.png").is_file()
    saved = SavedRun.of(tmp_path / "run")
    name = next(iter({"accuracy", "psnr"} & set(last)))
    assert saved.measure()["metrics"][name] == pytest.approx(last[name])
    assert saved.measure(str(folder), whole=True)["count"] == 10 and saved.measure(str(folder), limit=1)["count"] == 1
    (row,) = saved.predict([folder / "a" / "clips.npy"], tmp_path / "seen")
    assert (tmp_path / "seen" / row["picture"]).is_file()
    content = json.loads((tmp_path / "seen" / "predictions.json").read_text())["results"][0]
    if target == "class":
        assert content["label"] in ("a", "b") and [part["end"] for part in content["windows"]] == [3, 4, 5, 6]
    short = arrays(tmp_path / "short", (1, 2, 16, 16)) / "a" / "clips.npy"
    with pytest.raises(DataError, match="frames"):
        saved.predict([short], tmp_path / "seen")


def test_a_model_refuses_classes_that_it_does_not_know_and_sees_colours_as_it_was_trained(tmp_path):
    train(TINY.changed(data=str(arrays(tmp_path / "x"))), tmp_path / "run")
    saved = SavedRun.of(tmp_path / "run")
    with pytest.raises(DataError, match="class"):
        saved.measure(str(arrays(tmp_path / "y", classes=("a", "c"))))
    colour = arrays(tmp_path / "z", (4, 6, 16, 16, 3)) / "a" / "clips.npy"
    grey = numpy.load(colour).mean(-1).round().astype(numpy.uint8)
    numpy.save(tmp_path / "grey.npy", grey)
    rows = saved.predict([colour, tmp_path / "grey.npy"], tmp_path / "seen")
    assert rows[0]["probability"] == pytest.approx(rows[1]["probability"], abs=0.01)


def test_synthetic_data_are_of_their_kind_and_seed(tmp_path):
    one, two = (data.load(TINY.changed(seed=seed), tmp_path, print) for seed in (0, 1))
    assert one.classes == ("down", "left", "right", "up") and (len(one.train), len(one.test)) == (16, 8)
    assert not torch.equal(one.train.videos[0], two.train.videos[0])
    assert torch.equal(one.train.videos[0], data.load(TINY, tmp_path, print).train.videos[0])
    assert data.list_problems(TINY, str(next(tmp_path.glob("direction-*")))) == []
