"""Images in memory, with their classes: scikit-learn's handwritten digits, or a folder of your own."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, TensorDataset

from polymix.errors import DataError, MissingExtraError
from polymix.tasks.classify import cifar
from polymix.tasks.classify.pictures import FORMATS, HEIC, UNREADABLE, _read, fitted, read_picture
from polymix.tasks.classify.recipe import ImageRecipe
from polymix.tasks.classify.stream import Labelled, Pictures, Samples, StreamedImages, Unreadable, refused, transforms

SPLIT_SEED = 0
TEST_SHARE = 0.2
TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test")  # names of folders, as in ImageNet
LAYOUTS = ("folder", cifar.BINARY, cifar.PYTHON)  # a folder per class, with or without train and val; CIFAR-100
MAX_BYTES = 4 << 30  # images are kept decoded, as bytes


@dataclass(frozen=True)
class ImageData(Labelled):
    """Images (N, C, H, W) as bytes or small floats, split into training and test images. `normalise` makes inputs."""

    name: str
    classes: tuple[str, ...]
    train: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    skipped: tuple[str, ...] = ()
    mean: Tensor = field(init=False)
    std: Tensor = field(init=False)

    def __post_init__(self) -> None:
        sample = self.train[0][:2048].float()
        object.__setattr__(self, "mean", sample.mean((0, 2, 3), keepdim=True))
        object.__setattr__(self, "std", sample.std((0, 2, 3), keepdim=True).clamp_min(1e-6))

    @property
    def channels(self) -> int:
        return self.train[0].shape[1]

    @property
    def image_size(self) -> int:
        return self.train[0].shape[-1]

    @property
    def is_bytes(self) -> bool:
        """Whether images are bytes, as pictures are, and not small floats."""
        return self.train[0].dtype == torch.uint8

    @property
    def counts(self) -> tuple[int, int]:
        """Training and test images."""
        return len(self.train[1]), len(self.test[1])

    def test_batches(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """The test images and their classes, `size` at a time."""
        yield from zip(self.test[0].split(size), self.test[1].split(size), strict=True)

    @property
    def test_labels(self) -> Tensor:
        return self.test[1]

    def test_image(self, place: int) -> Tensor:
        return self.test[0][place]

    def data_sets(self) -> tuple[Dataset[Any], Dataset[Any]]:
        return TensorDataset(*self.train), TensorDataset(*self.test)

    def known_as(self, summary: Mapping[str, Any]) -> ImageData:
        """These images for a model trained on others: with its channels, its classes and its mean and deviation.

        Args:
            summary: of the training's data, as results.json has it.
        Raises:
            DataError: a class that the model does not know, or colours for a model of grey images.
        """
        classes, channels = tuple(summary["classes"]), int(summary["channels"])
        odd = [name for name in self.classes if name not in classes]
        if odd:
            got = f"the class {odd[0]!r} in {self.name}"
            raise DataError("--data", got, f"the model's classes: {', '.join(classes)}", "Rename its folder.")
        if summary["bytes"] != (self.train[0].dtype == torch.uint8):
            got, cure = f"{self.name} for a model trained on {summary['name']}", "Their values have other ranges."
            raise DataError("--data", got, "images like those of the training", cure)
        if self.channels not in (1, channels):
            got = f"images with {self.channels} channels in {self.name}"
            raise DataError("--data", got, f"{channels}, as the model takes", "Convert them to grey.")
        order = torch.tensor([classes.index(name) for name in self.classes])
        train, test = (
            (images.expand(-1, channels, -1, -1), order[labels]) for images, labels in (self.train, self.test)
        )
        known = replace(self, classes=classes, train=train, test=test)
        for name in ("mean", "std"):
            object.__setattr__(known, name, torch.tensor(summary[name]).reshape(1, -1, 1, 1))
        return known


@dataclass(frozen=True)
class ImageSets:
    """The images of a run, and the training images as a data set."""

    images: ImageData | StreamedImages
    train: Dataset[Any]

    def summary(self) -> dict[str, Any]:
        """What a saved model needs to take other images: the classes in order, channels, mean and deviation."""
        images = self.images
        return {
            "name": images.name, "classes": list(images.classes), "channels": images.channels,
            "bytes": images.is_bytes, "train": images.counts[0], "test": images.counts[1],
            "mean": images.mean.flatten().tolist(), "std": images.std.flatten().tolist(),
        }  # fmt: skip


@dataclass(frozen=True)
class StreamedSets(ImageSets):
    """Images that are decoded when they are used."""

    images: StreamedImages

    def fingerprint(self) -> list[int]:
        """Tells other files, classes or pixels apart without decoding pictures."""
        return [*self.images.counts, self.images.training.fingerprint(), self.images.held_out.fingerprint()]


def load(recipe: ImageRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> ImageSets:
    """The images of a recipe: its folder's, or the digits; in memory, or decoded when they are used."""
    size = recipe.image_size
    source = Path(recipe.data or "")
    layout = None if recipe.data is None else recipe.layout or cifar.recognise(source) or LAYOUTS[0]
    if recipe.stream or recipe.looks_again or (recipe.stream is None and too_many(source, layout, size)):
        return _streamed(recipe, source, layout, say)
    if layout is None:
        images = load_digits(size)
    elif layout == LAYOUTS[0]:
        images = load_folder(source, size)
    else:
        images = _load_cifar(source, str(layout), recipe.allow_pickle, size, say)
    for path in images.skipped:
        if recipe.broken == "refuse":
            raise refused(ValueError(path))
        say(f"Skipped {path}")
    return ImageSets(images, TensorDataset(*images.train))


def too_many(source: Path, layout: str | None, size: int) -> bool:
    """Whether a folder's images, decoded and `size` pixels wide, are larger than MAX_BYTES."""
    if layout is None:
        return False
    if layout != LAYOUTS[0]:
        return cifar.IMAGES * 3 * size**2 > MAX_BYTES
    parts = [_by_class(part) for part in find_splits(source) if part is not None]
    return sum(len(files) for part in parts for files in part.values()) * 3 * size**2 > MAX_BYTES


def _streamed(recipe: ImageRecipe, source: Path, layout: str | None, say: Callable[[str], None]) -> StreamedSets:
    if layout is None:
        digits = load_digits()
        name, classes = digits.name, digits.classes
        parts = tuple(Pictures(labels, rows=rows) for rows, labels in (digits.train, digits.test))
    elif layout != LAYOUTS[0]:
        classes, *pixels = cifar.read(source, layout, recipe.allow_pickle, say)
        name, parts = str(source), tuple(Pictures(labels, rows=rows) for rows, labels in pixels)
    else:
        name = str(source)
        classes, *parts = _list_folder(source)  # type: ignore[assignment]
    training, test = transforms(recipe)
    refuse = recipe.broken == "refuse"
    images = StreamedImages(name, classes, parts[0], parts[1], recipe.image_size, test, refuse)
    say(f"{len(parts[0]):,} training and {len(parts[1]):,} test images of {len(classes)} classes, decoded when used")
    return StreamedSets(images, Samples(parts[0], training, refuse))


def _list_folder(folder: Path) -> tuple[tuple[str, ...], Pictures, Pictures]:
    """The classes, in sorted order as ImageNet's, and the training and test files. No file is opened."""
    training, held_out = find_splits(folder)
    found, tests = _by_class(training), None if held_out is None else _by_class(held_out)
    classes = tuple(found)
    _check_classes({name: len(files) for name, files in found.items()}, ())
    if tests is not None:
        _check_same(set(classes), set(tests), training, held_out)
    parts = []
    for part in (found, tests):
        if part is not None:
            files = [str(file) for name in classes for file in part[name]]
            labels = torch.tensor([place for place, name in enumerate(classes) for _ in part[name]])
            parts.append(Pictures(labels, files, read=_open))
    if tests is None:
        train, test = _split(torch.arange(len(parts[0])), parts[0].labels)
        parts = [parts[0].chosen(train[0]), parts[0].chosen(test[0])]
    return classes, parts[0], parts[1]


def stream_folder(
    folder: Path, image_size: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> StreamedImages:
    """The images of `load_folder` for folders that do not fit into memory: in colour, decoded whenever they are used.

    Every file is read once, so that unreadable ones are left out before the training; `.skipped` names them. Inputs are
    normalised by ImageNet's mean and deviation. Raises DataError as `load_folder`, but for the size.
    """
    classes, *parts = _list_folder(folder)
    done, skipped, total = 0, list[str](), sum(map(len, parts))

    def tell() -> None:
        nonlocal done
        done += 1
        progress(done, total)

    train, test = (part.readable(skipped, tell) for part in parts)
    counts = torch.bincount(torch.cat((train.labels, test.labels)), minlength=len(classes))
    _check_classes(dict(zip(classes, counts.tolist(), strict=True)), skipped)
    fit = partial(fitted, size=image_size)
    return StreamedImages(str(folder), classes, train, test, image_size, fit, skipped=tuple(skipped))


def _open(path: Path) -> Any:
    try:
        return read_picture(path)
    except UNREADABLE as error:
        raise Unreadable(f"{path}: {str(error) or type(error).__name__}") from error


def _load_cifar(folder: Path, layout: str, allow_pickle: bool, size: int, say: Callable[[str], None]) -> ImageData:
    classes, *parts = cifar.read(folder, layout, allow_pickle, say)
    _check_size(sum(len(labels) for _, labels in parts), size)
    train, test = ((cifar.resized(images, size), labels) for images, labels in parts)
    return ImageData(str(folder), classes, train, test)


def check(folder: Path, layout: str | None = None, allow_pickle: bool = False) -> list[str]:
    """Every problem of a folder of images, in sentences. allow_pickle: read pickles, which can run any code."""
    folder, problems, held_out = Path(folder), list[str](), None
    layout = layout or cifar.recognise(folder) or LAYOUTS[0]
    training: Path | None
    try:
        if layout != LAYOUTS[0]:
            cifar.read(folder, layout, allow_pickle)
            return []
        training, held_out = find_splits(folder)
    except DataError as error:
        problems.append(str(error))
        training = next((folder / name for name in TRAINING if (folder / name).is_dir()), None)
    if training is None:
        return problems
    parts = [_by_class(part) for part in (training, held_out) if part is not None]
    for file in (file for found in parts for files in found.values() for file in files):
        try:
            _open(file)
        except Unreadable as error:
            problems.append(str(error))
    if len(parts[0]) < 2:
        problems.append(f"{training}: {len(parts[0])} classes with images; two or more are needed")
    if len(parts) == 2:
        problems += [f"{held_out}: no images of the class {name}" for name in parts[0] if name not in parts[1]]
        problems += [f"{training}: no images of the class {name}" for name in parts[1] if name not in parts[0]]
    return problems


def for_evaluation(
    recipe: ImageRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> ImageSets:
    """The images of a recipe as a trained model knows them; `test` is what to evaluate.

    whole: all images instead of those held out. limit: at most so many, drawn at random with a fixed seed.
    """
    loaded = load(recipe, Path(), say)
    if isinstance(loaded, StreamedSets):
        streamed = loaded.images.known_as(summary).restricted(whole, limit, SPLIT_SEED)
        return StreamedSets(streamed, loaded.train)
    images: Any = loaded.images.known_as(summary)
    test = (torch.cat((images.train[0], images.test[0])), torch.cat((images.train[1], images.test[1])))
    test = test if whole else images.test
    if limit is not None and limit < len(test[1]):
        drawn = torch.randperm(len(test[1]), generator=torch.Generator().manual_seed(SPLIT_SEED))[:limit]
        test = (test[0][drawn], test[1][drawn])
    chosen = replace(images, test=test)
    for name in ("mean", "std"):
        object.__setattr__(chosen, name, getattr(images, name))
    return ImageSets(chosen, TensorDataset(*chosen.train))


def from_summary(recipe: ImageRecipe, summary: Mapping[str, Any]) -> ImageSets:
    """The data of a finished run without its images: what building its model needs."""
    channels = int(summary["channels"])
    kind = torch.uint8 if summary["bytes"] else torch.float32
    empty = torch.zeros(2, channels, recipe.image_size, recipe.image_size, dtype=kind)
    none = (empty, torch.zeros(2, dtype=torch.int64))
    images = ImageData(str(summary["name"]), tuple(summary["classes"]), none, none).known_as(summary)
    return ImageSets(images, TensorDataset(*none))


def _split(images: Tensor, labels: Tensor) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor]]:
    try:
        from sklearn.model_selection import train_test_split
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "no such package", "pip install 'polymix[train]'") from error
    count = max(round(TEST_SHARE * len(labels)), int(labels.max()) + 1)  # at least one test image a class
    train, test = train_test_split(
        range(len(labels)), test_size=count, random_state=SPLIT_SEED, stratify=labels.numpy()
    )
    return (images[train], labels[train]), (images[test], labels[test])


def load_digits(image_size: int = 8) -> ImageData:
    """The 1,797 handwritten digits (8 × 8 pixels) that come with scikit-learn, split 80 : 20 with a fixed seed."""
    try:
        from sklearn import datasets
    except ImportError as error:
        raise MissingExtraError("scikit-learn", "no such package", "pip install 'polymix[train]'") from error
    bunch: Any = datasets.load_digits()
    images = torch.from_numpy(bunch.images).float()[:, None]
    if image_size != 8:
        images = torch.nn.functional.interpolate(images, size=image_size, mode="bilinear", antialias=True)
    train, test = _split(images, torch.from_numpy(bunch.target).long())
    return ImageData("scikit-learn digits", tuple(map(str, range(10))), train, test)


def _sub_folders(folder: Path) -> list[Path]:
    if not folder.is_dir():
        raise DataError(
            "--data", folder, "an existing folder with one sub-folder of images per class", "Check the path."
        )
    return sorted(path for path in folder.iterdir() if path.is_dir() and not path.name.startswith("."))


def find_splits(folder: Path) -> tuple[Path, Path | None]:
    """The folders of the training and of the test images, where `folder` holds such, as ImageNet does; else itself.

    That is, where all of its sub-folders have names such as train, val and test, and hold folders themselves.
    Raises DataError where train has a folder per class and val has none, as ImageNet's archives, or does not exist.
    """
    subs = _sub_folders(folder)
    training = [sub for sub in subs if sub.name.lower() in TRAINING and _sub_folders(sub)]
    held_out = [sub for name in HELD_OUT for sub in subs if sub.name.lower() == name and _sub_folders(sub)]
    flat = [sub for sub in subs if sub.name.lower() in HELD_OUT and sub not in held_out]
    if training and not held_out and len(subs) == 1 + len(flat):
        got = f"{flat[0]} without a folder per class" if flat else f"{folder} with {training[0].name} and without val"
        cure = "Sort its pictures into the folders of its classes." if flat else f"Pass {training[0]} to split it."
        raise DataError("--data", got, "train/CLASS/… and val/CLASS/…", cure)
    if len(training) != 1 or not held_out or len(subs) != 1 + len(held_out):
        return folder, None
    return training[0], held_out[0]


def find_images(folder: Path) -> dict[str, list[Path]]:
    """Image files by class. Each sub-folder is a class and is searched to any depth, in sorted order.

    In a folder with train and val (see `find_splits`) those are the classes of train.
    """
    return _by_class(find_splits(folder)[0])


def _by_class(folder: Path) -> dict[str, list[Path]]:
    found = {}
    for sub in _sub_folders(folder):
        files = sorted(path for path in sub.rglob("*") if path.suffix.lower() in FORMATS | HEIC and path.is_file())
        if files:
            found[sub.name] = files
    return found


def _check_size(total: int, image_size: int) -> None:
    size = total * 3 * image_size**2
    if size > MAX_BYTES:
        got = f"{total} images, {size / 2**30:.1f} GiB at {image_size} × {image_size}"
        raise DataError("--data", got, f"at most {MAX_BYTES >> 30} GiB", "Use a smaller --image-size or fewer images.")


def _check_classes(counts: Mapping[str, int], skipped: Sequence[str]) -> None:
    """DataError unless two classes or more have images, each of them two or more."""
    classes = [name for name, count in counts.items() if count]
    if len(classes) < 2 or min(counts[name] for name in classes) < 2:
        short = {name: count for name, count in counts.items() if len(classes) < 2 or count < 2}
        got = "readable images by class: " + (", ".join(f"{name}: {count}" for name, count in short.items()) or "none")
        cure = "Put each class into its own sub-folder, or remove classes with a single image."
        cure += f" Unreadable: {'; '.join(skipped)}" if skipped else ""
        raise DataError("--data", got, "two or more classes with two or more readable images each", cure)


def _check_same(training_classes: set[str], test_classes: set[str], training: Path, held_out: Path | None) -> None:
    if training_classes != test_classes:
        odd = ", ".join(sorted(training_classes ^ test_classes))
        raise DataError("--data", f"{odd} in one of {training} and {held_out} alone", "the same classes in both", "")


def load_folder(
    folder: Path, image_size: int, progress: Callable[[int, int], None] = lambda done, total: None
) -> ImageData:
    """Your own images, one folder per class, resized (short side) and centre-cropped to squares of image_size.

    A folder with train and val (or test), each with a folder per class, is split as it is; another one 80 : 20.

    If all images are grey, they keep one channel. Transparency becomes white. Of an animation the first frame is
    used. Grey images of 16 or 32 bits or of floats are scaled to bytes by their range. HEIC needs the package
    pillow-heif. Unreadable files, and those with more pixels than Pillow reads, are skipped and named in `.skipped`.

    Raises:
        DataError: no such folder, fewer than two classes with two readable images each, or too many images for memory.
    """
    training, held_out = find_splits(folder)
    found, tests = _by_class(training), {} if held_out is None else _by_class(held_out)
    total = sum(len(files) for part in (found, tests) for files in part.values())
    _check_size(total, image_size)
    skipped: list[str] = []
    done = 0

    def read(part: dict[str, list[Path]]) -> tuple[list[Tensor], list[str]]:
        nonlocal done
        images: list[Tensor] = []
        labels: list[str] = []
        for name, files in part.items():
            for path in files:
                try:
                    images.append(_read(path, image_size))
                    labels.append(name)
                except UNREADABLE as error:
                    skipped.append(f"{path}: {str(error) or type(error).__name__}")
                done += 1
                progress(done, total)
        return images, labels

    images, labels = read(found)
    counts = {name: labels.count(name) for name in found}
    classes = tuple(name for name, count in counts.items() if count)
    _check_classes(counts, skipped)
    test_images, test_labels = read(tests)
    if held_out is not None:
        _check_same(set(classes), set(test_labels), training, held_out)
    if all(bool((image[0] == image[1]).all() and (image[0] == image[2]).all()) for image in (*images, *test_images)):
        images, test_images = ([image[:1] for image in part] for part in (images, test_images))

    def joined(images: list[Tensor], labels: list[str]) -> tuple[Tensor, Tensor]:
        return torch.stack(images), torch.tensor([classes.index(label) for label in labels])

    if held_out is None:
        train, test = _split(*joined(images, labels))
    else:
        train, test = joined(images, labels), joined(test_images, test_labels)
    return ImageData(str(folder), classes, train, test, tuple(skipped))
