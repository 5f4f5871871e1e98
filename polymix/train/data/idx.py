"""Pictures in idx files, as MNIST and its relatives are published: four files, gzipped or not, read without Pillow."""

from __future__ import annotations

import gzip
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from polymix.errors import DataError, one_line
from polymix.files import regular

if TYPE_CHECKING:
    from torch import Tensor

IDX = "idx"  # the layout
FASHION = "fashion-mnist"  # as --data
INSTALLED = Path("/usr/share/datasets/fashion-mnist")  # where Debian's package puts Fashion-MNIST
# Where the files lie in a folder: torchvision's datasets leave NAME/raw, `dpkg-deb -x` the whole path.
INSIDE = (".", "raw", "FashionMNIST/raw", "MNIST/raw", INSTALLED.relative_to("/").as_posix())
TRAIN, TEST = ("train-images", "train-labels"), ("t10k-images", "t10k-labels")
FASHION_TEST = 0x242BC73F  # CRC-32 of the labels of Fashion-MNIST's test, by which its classes get their names
FASHION_CLASSES = (
    "T-shirt/top", "Trouser", "Pullover", "Dress", "Coat", "Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot",
)  # fmt: skip
UNSIGNED = 8  # the code of bytes, the only kind that pictures and labels have
MAX_VALUES = 4 << 30  # of a file, whose header can promise anything
AGAIN = "Unpack or download it again."
Part = tuple["Tensor", "Tensor"]


def located(source: str) -> Path:
    """The folder of `--data`: a path, or where the package of "fashion-mnist" is installed, if that is no path.

    Raises DataError: it is not installed.
    """
    if source != FASHION or Path(source).exists():
        return Path(source)
    if recognise(INSTALLED) is None:
        cure = "Install it: apt-get install dataset-fashion-mnist, or pass a folder with its idx files."
        raise DataError("--data", f"{FASHION}, which is not in {INSTALLED}", "Debian's package of it", cure)
    return INSTALLED


def recognise(folder: Path) -> str | None:
    """IDX for a folder with the pictures of a training as an idx file, at a place that INSIDE names; else None."""
    return IDX if _home(folder) is not None else None


def count(folder: Path) -> int:
    """How many pictures there are, by the headers. Raises DataError as `read` does."""
    total = 0
    for pictures, _ in (TRAIN, TEST):
        with _opened(folder, pictures, 3) as (_, shape, _):
            total += shape[0]
    return total


def read(folder: Path) -> tuple[tuple[str, ...], Part, Part]:
    """The classes, the training and the test pictures (N, 1, H, W) as bytes, with their labels: split as published.

    Raises DataError: a file is missing or damaged, holds something else, or does not fit the others.
    """
    (train, labels), (test, answers) = (_part(folder, *names) for names in (TRAIN, TEST))
    if train.shape[1:] != test.shape[1:]:
        got = (
            f"{folder} with pictures of {tuple(train.shape[2:])} for training and {tuple(test.shape[2:])} for the test"
        )
        raise DataError("--data", got, "one size", AGAIN)
    return _named(folder, labels, answers), (train, labels), (test, answers)


def classes(folder: Path) -> tuple[str, ...]:
    """The classes alone. Raises DataError as `read` does."""
    return _named(folder, *(_values(folder, names[1], 1) for names in (TRAIN, TEST)))


def _named(folder: Path, labels: Tensor, answers: Tensor) -> tuple[str, ...]:
    """The classes of training and test labels: numbers up to the largest in training, or Fashion-MNIST's names."""
    fashion = zlib.crc32(bytes(answers.tolist())) == FASHION_TEST
    names = FASHION_CLASSES if fashion else tuple(map(str, range(int(labels.max()) + 1)))
    for name, part in ((TRAIN[1], labels), (TEST[1], answers)):
        if int(part.max()) >= len(names):
            place = int((part >= len(names)).nonzero()[0, 0])
            got = f"{name} in {folder} with label {int(part[place])} of picture {place}"
            raise DataError("--data", got, f"labels below {len(names)}", AGAIN)
    return names


def _part(folder: Path, pictures: str, labels: str) -> Part:
    images, answers = _values(folder, pictures, 3), _values(folder, labels, 1)
    if len(images) != len(answers):
        got = f"{folder} with {len(images):,} {pictures} and {len(answers):,} {labels}"
        raise DataError("--data", got, "as many labels as pictures", AGAIN)
    return images[:, None], answers.long()


def _home(folder: Path) -> Path | None:
    """The folder in `folder` that holds the files."""
    return next((folder / inside for inside in INSIDE if _file(folder / inside, TRAIN[0]) is not None), None)


def _file(home: Path, name: str) -> Path | None:
    """A file by its name, as the authors write it or with a dot, gzipped or not."""
    kind = "idx3" if name.endswith("images") else "idx1"
    paths = (home / f"{name}{mark}{kind}-ubyte{end}" for mark in "-." for end in ("", ".gz"))
    return next((path for path in paths if path.is_file()), None)


@contextmanager
def _opened(folder: Path, name: str, axes: int) -> Iterator[tuple[Path, tuple[int, ...], IO[bytes]]]:
    """A file's path, its shape, and the file itself after the header. Raises DataError for what is no such file."""
    home = _home(folder)
    path = None if home is None else _file(home, name)
    if path is None:
        raise DataError("--data", f"{folder} without {name}", "the four idx files of a data set", AGAIN)
    try:
        with open(regular(path), "rb") as plain:
            packed = plain.read(2) == b"\x1f\x8b"
            plain.seek(0)
            file: Any = gzip.GzipFile(fileobj=plain) if packed else plain
            head = file.read(4 + 4 * axes)
            if head[:4] != bytes((0, 0, UNSIGNED, axes)) or len(head) < 4 + 4 * axes:
                got = f"{path}, which begins with {head[:4].hex(' ') or 'nothing'}"
                allowed = f"00 00 08 {axes:02x}: an idx file of bytes with {axes} axes"
                raise DataError("--data", got, allowed, AGAIN)
            shape = tuple(int.from_bytes(head[at : at + 4], "big") for at in range(4, len(head), 4))
            if math.prod(shape) > MAX_VALUES:
                got = f"{path} with {' × '.join(map(str, shape))} values"
                raise DataError("--data", got, f"at most {MAX_VALUES:,}", AGAIN)
            yield path, shape, file
    except (OSError, EOFError, zlib.error) as error:
        got = f"{path}, which cannot be read ({one_line(error)})"
        raise DataError("--data", got, "an idx file, gzipped or not", AGAIN) from error


def _values(folder: Path, name: str, axes: int) -> Tensor:
    import torch  # late: options, which name the data, need none of it

    with _opened(folder, name, axes) as (path, shape, file):
        size = math.prod(shape)
        content = bytearray(file.read(size + 1))
        if len(content) != size:
            got = f"{path} with {'more' if len(content) > size else f'{len(content):,}'} bytes after its header"
            raise DataError("--data", got, f"{size:,}, as the header says", AGAIN)
        if not size:
            raise DataError("--data", f"{path}, which is empty", "pictures and their labels", AGAIN)
    return torch.frombuffer(content, dtype=torch.uint8).reshape(shape)
