"""`polymix compare --data` with a folder that is too large for memory."""

import torch
from PIL import Image
from torch import nn

from polymix.tasks.classify import Schedule, data
from polymix.tasks.classify.stream import StreamedImages
from polymix.tasks.classify.training import train
from polymix.workflows.compare.run import Settings, _answers, _load, _samples


class Quiet:
    def start(self, name, total):
        return lambda done: None


def photos(folder):
    for place, name in enumerate(("red", "blue")):
        (folder / name).mkdir(parents=True)
        for number in range(10):
            Image.new("RGB", (20, 12), ((200, 10 + number, 0), (0, 10 + number, 200))[place]).save(
                folder / name / f"{number}.png"
            )
    (folder / "red" / "broken.png").write_bytes(b"not a picture")
    return folder


def test_folders_beyond_the_limit_are_streamed_and_their_pictures_are_those_of_memory(tmp_path, monkeypatch):
    settings = Settings(data=str(photos(tmp_path)), image_size=8)
    whole = _load(settings, Quiet())
    monkeypatch.setattr(data, "MAX_BYTES", 100)
    images = _load(settings, Quiet())
    assert isinstance(images, StreamedImages) and not isinstance(whole, StreamedImages)
    assert images.classes == whole.classes and images.channels == 3 and sum(images.counts) == sum(whole.counts) == 20
    assert len(images.skipped) == 1 and "broken.png" in images.skipped[0]
    seen, kept = (
        sorted((int(label), picture.flatten().tolist()) for part in each.data_sets() for picture, label in part)
        for each in (images, whole)
    )
    assert seen == kept
    assert all(row["image"].startswith("data:image/png") for row in _samples(images))


def test_streamed_pictures_are_learned(tmp_path, monkeypatch):
    monkeypatch.setattr(data, "MAX_BYTES", 100)
    images = _load(Settings(data=str(photos(tmp_path)), image_size=8), Quiet())
    build = lambda: nn.Sequential(nn.Flatten(), nn.Linear(3 * 64, 2))  # noqa: E731
    _, outcome = train(build, images, Schedule(epochs=8, learning_rate=1e-2, batch_size=4), seed=0)
    assert outcome.accuracy == 1 and len(outcome.predictions) == images.counts[1]
    found = _answers(outcome.predictions, images)
    assert torch.tensor(found["confusion"]).diagonal().sum() == images.counts[1]
