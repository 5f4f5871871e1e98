"""Small data sets in idx files, as MNIST's are."""

import gzip
import struct

import torch

CLASSES = 4


def packed(array):
    """An array of bytes as its authors write it: two zeros, the type, the axes, each size, the values."""
    return struct.pack(f">HBB{array.ndim}I", 0, 8, array.ndim, *array.shape) + array.numpy().tobytes()


def arrays(size=(6, 5)):
    """The arrays by the names of their files."""
    torch.manual_seed(0)
    parts = {}
    for part, count in (("train", 8), ("t10k", CLASSES)):
        parts[f"{part}-images-idx3-ubyte"] = torch.randint(0, 256, (count, *size), dtype=torch.uint8)
        parts[f"{part}-labels-idx1-ubyte"] = (torch.arange(count) % CLASSES).to(torch.uint8)
    return parts


def write_idx(folder, size=(6, 5), zipped=True, others=()):
    """Write the four files, with other bytes in place of some; return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, array in arrays(size).items():
        content = gzip.compress(packed(array)) if zipped else packed(array)
        (folder / f"{name}{'.gz' * zipped}").write_bytes(dict(others).get(name, content))
    return folder
