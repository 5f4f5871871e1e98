"""What results.json of `polymix compare` holds."""

from __future__ import annotations

from typing import Annotated, Any, Literal, TypedDict

from polymix.measure.sweep import Row
from polymix.results import Between, Machine
from polymix.train.rows import TrainRow


class Majority(TypedDict):
    name: str
    share: float


Sample = TypedDict("Sample", {"class": int, "image": str})


class _OfPictures(TypedDict, total=False):
    channels: Annotated[int, "of pictures"]
    image_size: Annotated[int, "of pictures, pixels a side"]


class Data(_OfPictures):
    """The classified samples of a comparison."""

    name: str
    classes: Annotated[list[str], Between(2)]
    train: Annotated[int, "number of samples"]
    test: Annotated[int, "number of samples"]
    skipped: Annotated[list[str], "unreadable files and why"]
    majority: Annotated[Majority, "the most frequent class of the test samples, and its share"]
    samples: Annotated[list[Sample], "some test pictures as data URLs, with the number of their class"]


class Host(TypedDict):
    """The model that every mixer is put into, and its training."""

    name: str
    describe: Annotated[str, "model and data in a sentence, with the first mixer"]
    tokens: Annotated[int | None, "its own number of tokens; null: it is timed at no others"]
    recipe: Annotated[dict[str, Any], "of the first run"]


class Mixer(TypedDict):
    label: str
    config: Annotated[dict[str, Any], "empty for a host without a block"]
    flops: Annotated[int | None, "of the whole host on one input, 2 a multiply-add; null: not counted"]


class Refused(TypedDict):
    """A mixer that the host cannot take."""

    mixer: str
    reason: str


class Answered(TypedDict):
    """What a run answered for test samples."""

    mixer: str
    seed: int
    samples: Annotated[list[int], "the class answered for each of data.samples; empty: other samples than those"]
    confusion: Annotated[
        list[list[int]] | None,
        "test samples of each class (rows) by the class answered (columns); null: over 20 classes",
    ]


class Verdict(TypedDict):
    """The headline as data: what to do at the model's own token count."""

    action: Literal["replace", "keep", "open"]
    why: Literal["faster", "slower", "similar", "unclear", "less accurate", "not measured", "no reference"]
    mixer: Annotated[str | None, "to use, or the one that comes nearest"]
    tokens: int
    gain: Annotated[float | None, "speedup over attention; null: not measured, or attention was stopped"]
    low: float | None
    high: float | None
    sentence: str


class Crossover(TypedDict):
    alone: float | None
    host: float | None


class _Decided(TypedDict, total=False):
    open: Annotated[list[int], "those of them at which the runs vary too much to say"]
    verdict: Verdict


class Answer(_Decided):
    """What follows from the measurements."""

    headline: str
    sentences: list[str]
    take: Annotated[dict[str, str], "token count -> mixer that pays there"]
    keep_attention: Annotated[list[int], "token counts at which none clearly pays"]
    crossover: Annotated[
        dict[str, Crossover],
        "tokens from which on a mixer is faster than attention at every measured count; null: never",
    ]
    noise: Annotated[float, "difference in the first metric that chance alone makes"]


class Content(TypedDict):
    """results.json of a comparison."""

    schema: Literal["polymix.compare/1"]
    finished: Annotated[bool, "false while a run goes on or after it was interrupted"]
    settings: Annotated[dict[str, Any], "what was asked for; --resume needs the same"]
    machine: Machine
    host: Host | None
    data: Annotated[Data | None, "null: not of a task that answers with classes"]
    mixers: list[Mixer]
    refused: list[Refused]
    rows: Annotated[list[TrainRow], "a training run each; a headline of null: it diverged"]
    answers: list[Answered]
    control: Annotated[str | None, "how far linear_floor is from the mixers"]
    pictures: Annotated[dict[str, str], "mixer -> file with its predictions"]
    sweep: list[Row]
    answer: Annotated[Answer | None, "null: no lengths were measured"]
