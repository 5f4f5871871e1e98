"""Images in memory, with their classes: scikit-learn's handwritten digits, or a folder of your own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import TensorDataset

from polymix.errors import DataError, MissingExtraError
from polymix.tasks.classify.recipe import ImageRecipe

SPLIT_SEED = 0
TEST_SHARE = 0.2
FORMATS = {".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm", ".pbm"}
HEIC = {".heic", ".heif"}  # read by pillow-heif
TRAINING, HELD_OUT = ("train", "training"), ("val", "valid", "validation", "test")  # names of folders, as in ImageNet
MAX_BYTES = 4 << 30  # images are kept decoded, as bytes


@dataclass(frozen=True)
class ImageData:
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
    def majority(self) -> tuple[str, float]:
        """The most frequent class of the test images, and its share: what always answering with it would reach."""
        counts = torch.bincount(self.test[1], minlength=len(self.classes))
        return self.classes[int(counts.argmax())], (counts.max() / counts.sum()).item()

    def thumbnail(self, place: int, side: int = 64) -> bytes:
        """A test image as a PNG file, at most `side` pixels wide."""
        from PIL import Image

        image = self.test[0][place].float()
        low, high = (0.0, 255.0) if self.test[0].dtype == torch.uint8 else (image.min().item(), image.max().item())
        if image.shape[-1] > side:
            image = torch.nn.functional.interpolate(image[None], size=side, mode="bilinear", antialias=True)[0]
        grey = ((image - low) / ((high - low) or 1) * 255).round().clamp(0, 255).to(torch.uint8)
        rgb = grey.expand(3, -1, -1).permute(1, 2, 0).contiguous()
        file = BytesIO()
        Image.frombytes("RGB", (rgb.shape[1], rgb.shape[0]), bytes(rgb.flatten().tolist())).save(file, "PNG")
        return file.getvalue()

    def normalise(self, images: Tensor) -> Tensor:
        """Images as inputs, with mean 0 and variance 1 per channel over the training images."""
        return (images.float() - self.mean.to(images.device)) / self.std.to(images.device)

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

    images: ImageData
    train: TensorDataset

    def summary(self) -> dict[str, Any]:
        """What a saved model needs to take other images: the classes in order, channels, mean and deviation."""
        images = self.images
        return {
            "name": images.name, "classes": list(images.classes), "channels": images.channels,
            "bytes": images.train[0].dtype == torch.uint8, "train": len(images.train[0]), "test": len(images.test[0]),
            "mean": images.mean.flatten().tolist(), "std": images.std.flatten().tolist(),
        }  # fmt: skip


def load(recipe: ImageRecipe, folder: Path, say: Callable[[str], None] = lambda text: None) -> ImageSets:
    """The images of a recipe: its folder's, or the digits."""
    size = recipe.image_size
    images = load_digits(size) if recipe.data is None else load_folder(Path(recipe.data), size)
    for path in images.skipped:
        say(f"Skipped {path}")
    return ImageSets(images, TensorDataset(*images.train))


def for_evaluation(
    recipe: ImageRecipe, summary: Mapping[str, Any], whole: bool, limit: int | None, say: Callable[[str], None]
) -> ImageSets:
    """The images of a recipe as a trained model knows them; `test` is what to evaluate.

    whole: all images instead of those held out. limit: at most so many, drawn at random with a fixed seed.
    """
    images = load(recipe, Path(), say).images.known_as(summary)
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
    """
    subs = _sub_folders(folder)
    training = [sub for sub in subs if sub.name.lower() in TRAINING and _sub_folders(sub)]
    held_out = [sub for name in HELD_OUT for sub in subs if sub.name.lower() == name and _sub_folders(sub)]
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
    size = total * 3 * image_size**2
    if size > MAX_BYTES:
        got = f"{total} images, {size / 2**30:.1f} GiB at {image_size} × {image_size}"
        raise DataError("--data", got, f"at most {MAX_BYTES >> 30} GiB", "Use a smaller --image-size or fewer images.")
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
                except (OSError, ValueError, SyntaxError, EOFError) as error:  # what Pillow raises on broken files
                    skipped.append(f"{path}: {str(error) or type(error).__name__}")
                done += 1
                progress(done, total)
        return images, labels

    images, labels = read(found)
    counts = {name: labels.count(name) for name in found}
    classes = tuple(name for name, count in counts.items() if count)
    if len(classes) < 2 or min(counts[name] for name in classes) < 2:
        short = {name: count for name, count in counts.items() if len(classes) < 2 or count < 2}
        got = "readable images by class: " + (", ".join(f"{name}: {count}" for name, count in short.items()) or "none")
        cure = "Put each class into its own sub-folder, or remove classes with a single image."
        cure += f" Unreadable: {'; '.join(skipped)}" if skipped else ""
        raise DataError("--data", got, "two or more classes with two or more readable images each", cure)
    test_images, test_labels = read(tests)
    if held_out is not None and set(test_labels) != set(classes):
        odd = ", ".join(sorted(set(test_labels) ^ set(classes)))
        raise DataError("--data", f"{odd} in one of {training} and {held_out} alone", "the same classes in both", "")
    if all(bool((image[0] == image[1]).all() and (image[0] == image[2]).all()) for image in (*images, *test_images)):
        images, test_images = ([image[:1] for image in part] for part in (images, test_images))

    def joined(images: list[Tensor], labels: list[str]) -> tuple[Tensor, Tensor]:
        return torch.stack(images), torch.tensor([classes.index(label) for label in labels])

    if held_out is None:
        train, test = _split(*joined(images, labels))
    else:
        train, test = joined(images, labels), joined(test_images, test_labels)
    return ImageData(str(folder), classes, train, test, tuple(skipped))


@cache
def _register_heic() -> None:
    """Let Pillow read HEIC."""
    try:
        import pillow_heif
    except ImportError as error:
        raise ValueError("HEIC needs another package: pip install pillow-heif") from error
    pillow_heif.register_heif_opener()


def read_picture(path: Path) -> Any:
    """The picture in a file as an upright RGB image of Pillow. Transparency becomes white.

    Raises OSError, ValueError, SyntaxError or EOFError for a file that cannot be read.
    """
    try:
        from PIL import Image, ImageOps
    except ImportError as error:
        raise MissingExtraError("pillow", "no such package", "pip install 'polymix[train]'") from error
    if path.suffix.lower() in HEIC:
        _register_heic()
    try:
        opened = Image.open(path)
    except Image.DecompressionBombError as error:
        raise ValueError(f"over {2 * (Image.MAX_IMAGE_PIXELS or 0):,} pixels, more than Pillow reads") from error
    with opened as image:
        upright = ImageOps.exif_transpose(image)
        if upright.mode == "F" or upright.mode.startswith("I"):
            upright = _as_bytes(upright)
        if upright.has_transparency_data:
            upright = upright.convert("RGBA")
            upright = Image.alpha_composite(Image.new("RGBA", upright.size, "white"), upright)
        return upright.convert("RGB")


def as_tensor(image: Any) -> Tensor:
    """An RGB image of Pillow as (3, H, W) bytes."""
    data = torch.frombuffer(bytearray(image.tobytes()), dtype=torch.uint8)
    return data.reshape(image.height, image.width, 3).permute(2, 0, 1).contiguous()


def _read(path: Path, size: int) -> Tensor:
    """The image in a file as (3, size, size) bytes."""
    picture = read_picture(path)
    from PIL import Image, ImageOps

    return as_tensor(ImageOps.fit(picture, (size, size), Image.Resampling.BILINEAR))


def _as_bytes(image: Any) -> Any:
    """A grey image of 16 or 32 bits or of floats as bytes; Pillow's own conversion cuts off at 255, which is white.

    16 bits: by their whole range. Floats in [0, 1]: by that range. Others: from the smallest to the largest value, or
    as they are where these fit into a byte.
    """
    sixteen = image.mode.startswith("I;16")
    image = image if image.mode in ("I", "F") else image.convert("I")
    low, high = image.getextrema()
    if image.mode == "F":
        low, high = (0.0, 1.0) if low >= 0 and high <= 1 else (0, 255) if low >= 0 and high <= 255 else (low, high)
    elif sixteen or (low >= 0 and 255 < high <= 65535):  # older versions of Pillow read 16 bits as 32
        low, high = 0, 65535
    elif low >= 0 and high <= 255:
        low, high = 0, 255
    scale = 255 / ((high - low) or 1)
    return image.convert("F").point(lambda value: value * scale + -low * scale).convert("L")
