"""Readers of video: real small files of every kind, and each mistake of a user as one sentence with its file."""

import numpy
import pytest
import torch
from PIL import Image

from polymix.domains.video import data
from polymix.domains.video.reading import find_videos, read
from polymix.domains.video.recipe import VideoRecipe
from polymix.errors import DataError, MissingExtraError
from polymix.train.run import train
from polymix.train.saved import SavedRun

WITHOUT_AV = "untested: files of video, for which PyAV is needed (the video extra)"
TINY = VideoRecipe.tiny().changed(control=False)


def frames(folder, count=4, size=(20, 16), first=0):
    """PNG files named without leading zeros, each of one grey value of its own."""
    folder.mkdir(parents=True, exist_ok=True)
    for place in range(first, first + count):
        Image.new("RGB", size, (20 * place,) * 3).save(folder / f"{place}.png")
    return folder


def video(path, count=6, size=(32, 24), times=None, codec="mpeg4"):
    """A file that PyAV encodes, 25 frames a second, or with a frame at each of `times`, in hundredths of a second."""
    av = pytest.importorskip("av", reason=WITHOUT_AV)
    from fractions import Fraction

    path.parent.mkdir(parents=True, exist_ok=True)
    with av.open(str(path), "w") as container:
        stream = container.add_stream(codec, rate=25)
        stream.width, stream.height, stream.pix_fmt = *size, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 100)
        for place in range(count):
            picture = numpy.full((size[1], size[0], 3), 30 * place % 256, numpy.uint8)
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            frame.pts, frame.time_base = (times or range(0, 400, 4))[place], Fraction(1, 100)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return path


def problems(folder, **options):
    return data.list_problems(TINY.changed(data=str(folder), **options), str(folder))


def test_frames_are_in_the_order_of_their_numbers(tmp_path):
    (clip,) = read(frames(tmp_path / "clip", 12), 16)
    assert clip.shape == (12, 3, 16, 16) and clip[:, 0, 0, 0].tolist() == [20 * place for place in range(12)]


def test_a_video_is_its_frames(tmp_path):
    (clip,) = read(video(tmp_path / "x.mp4"), 8)
    assert clip.shape == (6, 3, 8, 8)
    assert (clip.float().mean((1, 2, 3)) - torch.arange(0, 180, 30)).abs().max() < 6, "one grey after the other"


def test_a_video_is_turned_as_it_is_shown(tmp_path):
    """Where a phone was held upright, the file says by how much its pixels are to be turned."""
    from polymix.domains.video.reading import _upright

    class Frame:
        rotation = 90

        def to_ndarray(self, format):
            return numpy.arange(24, dtype=numpy.uint8).reshape(2, 4, 3)

    turned = _upright(Frame())
    assert turned.shape == (3, 4, 2) and torch.equal(
        turned, torch.rot90(torch.arange(24).reshape(2, 4, 3).permute(2, 0, 1), 1, (1, 2))
    )


def test_a_single_gap_of_many_frames_is_no_variable_frame_rate(tmp_path):
    (clip,) = read(video(tmp_path / "x.mkv", 40, times=[0, *range(8, 400, 4)]), 8)
    assert len(clip) == 40, "as files that were cut begin"


@pytest.mark.parametrize("shape", [(2, 5, 8, 8), (2, 5, 8, 8, 3)])
def test_arrays_are_clips_with_or_without_colour(tmp_path, shape):
    whole = numpy.random.default_rng(0).integers(0, 255, shape).astype(numpy.uint8)
    numpy.save(tmp_path / "x.npy", whole)
    one, two = read(tmp_path / "x.npy", 8)
    colours = whole if whole.ndim == 5 else whole[..., None]
    assert numpy.array_equal(torch.stack((one, two)).permute(0, 1, 3, 4, 2).numpy(), colours)


def test_clips_of_all_kinds_lie_side_by_side(tmp_path):
    for name in ("a", "b"):
        frames(tmp_path / name / "one")
        frames(tmp_path / name / "deep" / "two")
        numpy.save(tmp_path / name / "more.npy", numpy.zeros((2, 4, 16, 16), numpy.uint8))
    assert [path.name for path in find_videos(tmp_path / "a")] == ["two", "more.npy", "one"]
    parts = data.load(TINY.changed(data=str(tmp_path)), tmp_path, print)
    assert parts.channels == 3 and len(parts.train) + len(parts.test) == 8 and parts.classes == ("a", "b")
    assert parts.train[0][0].shape == (3, 3, 16, 16), "grey clips among clips in colour"
    assert problems(tmp_path) == []


def test_next_frames_need_no_classes_and_keep_the_test_apart(tmp_path):
    for part, count in (("train", 3), ("test", 2)):
        for place in range(count):
            frames(tmp_path / part / str(place), 5)
    parts = data.load(TINY.changed(data=str(tmp_path), target="next_frame"), tmp_path, print)
    assert (len(parts.train), len(parts.test)) == (3, 2)
    for place in range(4):
        frames(tmp_path / "flat" / str(place), 5)
    parts = data.load(TINY.changed(data=str(tmp_path / "flat"), target="next_frame"), tmp_path, print)
    assert len(parts.train) + len(parts.test) == 4


def broken_video(folder):
    path = video(folder / "x.mp4")
    path.write_bytes(path.read_bytes()[:200])


def uneven_video(folder):
    video(folder / "x.mkv", times=[0, 4, 8, 12, 40, 44])


def sound(folder):
    av = pytest.importorskip("av", reason=WITHOUT_AV)
    folder.mkdir(parents=True, exist_ok=True)
    with av.open(str(folder / "x.mp4"), "w") as container:
        stream = container.add_stream("aac", rate=8000)
        frame = av.AudioFrame.from_ndarray(numpy.zeros((1, 1024), numpy.float32), format="fltp", layout="mono")
        frame.rate = 8000
        container.mux(stream.encode(frame))
        container.mux(stream.encode())


def mixed_sizes(folder):
    frames(folder / "x")
    frames(folder / "x", 1, (18, 16), first=4)


def broken_frame(folder):
    (frames(folder / "x") / "9.png").write_bytes(b"no picture")


def array_of(shape, kind=numpy.uint8):
    def write(folder):
        folder.mkdir(parents=True, exist_ok=True)
        numpy.save(folder / "x.npy", numpy.zeros(shape, kind))

    return write


@pytest.mark.parametrize(("write", "said"), [
    (broken_video, "x.mp4, which cannot be read"), (uneven_video, "frame 5 comes after 0.280 s instead of 0.040 s"),
    (sound, "x.mp4, which has no pictures"), (mixed_sizes, "4.png, which is 18 × 16, after frames of 20 × 16"),
    (broken_frame, "9.png, which cannot be read"), (lambda folder: (folder / "x").mkdir(parents=True), "x, which has no frames"),
    (lambda folder: frames(folder / "x", 2), "x: 2 frames; a clip has 3"),
    (array_of((0, 4, 8, 8)), "x.npy, which has no frames"), (array_of((2, 0, 8, 8)), "x.npy, which has no frames"),
    (array_of((2, 4, 8)), "x.npy with uint8 (2, 4, 8)"), (array_of((2, 4, 8, 8), numpy.float32), "x.npy with float32"),
    (array_of((2, 2, 8, 8)), "x.npy: clip 1: 2 frames; a clip has 3"),
])  # fmt: skip
def test_a_mistake_is_one_sentence_with_its_file_for_check_and_for_training(write, said, tmp_path):
    write(tmp_path / "a")
    frames(tmp_path / "b" / "fine")
    (line,) = problems(tmp_path)
    assert said in line and "\n" not in line
    with pytest.raises(DataError, match="--check lists all") as error:
        data.load(TINY.changed(data=str(tmp_path)), tmp_path, print)
    assert said in str(error.value)


def test_what_is_wrong_with_the_folder_is_said(tmp_path):
    assert (
        "no folder" in problems(tmp_path / "none", target="next_frame")[0] or "none" in problems(tmp_path / "none")[0]
    )
    frames(tmp_path / "a" / "one")
    assert "two or more classes" in problems(tmp_path)[0] or "a: 1" in problems(tmp_path)[0]
    numpy.save(tmp_path / "loose.npy", numpy.zeros((2, 4, 8, 8), numpy.uint8))
    assert any("loose.npy: a clip that lies in no folder of a class" in line for line in problems(tmp_path))
    assert "1 clips" in problems(tmp_path / "a", target="next_frame")[0]


def test_without_av_a_video_asks_for_the_extra(tmp_path, monkeypatch):
    (tmp_path / "x.mp4").write_bytes(b"")
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(MissingExtraError, match=r"polymix\[video\]|video"):
        read(tmp_path / "x.mp4", 8)


@pytest.mark.slow
@pytest.mark.draws
def test_a_folder_of_frames_and_a_video_are_predicted(tmp_path):
    for name in ("a", "b"):
        for place in range(3):
            frames(tmp_path / "x" / name / str(place))
    train(TINY.changed(data=str(tmp_path / "x")), tmp_path / "run")
    files = [tmp_path / "x" / "a" / "0", video(tmp_path / "y.mp4")]
    rows = SavedRun.of(tmp_path / "run").predict(files, tmp_path / "seen")
    assert [len(row["windows"]) for row in rows] == [2, 4]
    assert all((tmp_path / "seen" / row["picture"]).is_file() for row in rows)
