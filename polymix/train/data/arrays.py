"""Arrays in files of numpy (.npy): the one reader, which trusts neither the header nor the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy

from polymix.errors import DataError, reason_of
from polymix.files import regular, write_whole

KINDS = "biuf"  # bool, int, unsigned, float


def read_array(path: Path, argument: str = "data", *, mapped: bool = False) -> Any:
    """The array of numbers in a .npy file. Pickles are refused, and a header that promises more than the file has.

    Args:
        argument: for the error.
        mapped: leave the numbers on disk until they are used.
    Raises:
        DataError: the file is missing, damaged, or holds no numbers.
    """
    try:
        array = numpy.lib.format.open_memmap(regular(path), mode="r")  # reads no more than the file has
    except Exception as error:  # of a damaged header numpy raises what its parser, its sums or mmap do
        cure = "Check the path." if isinstance(error, FileNotFoundError) else "Remove or write it again."
        reason = "it does not exist" if isinstance(error, FileNotFoundError) else reason_of(error)
        raise DataError(argument, f"{path}, which cannot be read ({reason})", "an array of numpy", cure) from error
    if array.dtype.kind not in KINDS:
        got = f"{path}, which holds {array.dtype} instead of numbers"
        raise DataError(argument, got, "an array of numbers", "Write it again.")
    if not array.dtype.isnative:  # which PyTorch does not take
        return array.astype(array.dtype.newbyteorder("="))
    return array if mapped else numpy.array(array)


def write_array(path: Path, values: Any) -> None:
    """Write an array of numpy as a .npy file, whole or not at all."""

    def write(part: Path) -> None:
        with open(part, "wb") as file:  # of a path numpy would change the suffix
            numpy.save(file, values)

    write_whole(path, write)
