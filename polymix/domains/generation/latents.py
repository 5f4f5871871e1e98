"""Latents of pictures: an AutoencoderKL from a local folder, and a cache of what it makes of pictures."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypedDict

import numpy
import torch
from torch import Tensor
from torch.utils.data import Dataset

from polymix.convert.adapters.libraries import load_library, load_whole
from polymix.domains.generation.quality import batches
from polymix.errors import DataError, OptionError, PolymixError, one_line
from polymix.files import output_folder, read_json, remove_unfinished, sha256, write_whole
from polymix.results import Between, Count, schema_name, wrong_part
from polymix.train.data.arrays import read_array, write_array
from polymix.train.data.problems import Problems

MANIFEST = "latents.json"
SHARD = 1024  # pictures in a file of a cache
SPLITS = ("train", "test")
ALLOWED = "a folder of an AutoencoderKL that diffusers saved"
CACHED = "a cache that polymix train generation wrote"
DECODED_AT_ONCE = 8  # latents


@dataclass
class Autoencoder:
    """An AutoencoderKL between pictures (B, 3, S, S) from -1 to 1 and latents (B, C, S / factor, S / factor).

        latents = (z - shift) · scaling,   z ~ N(mean, std²) as the encoder says

    Args:
        folder: where it is. checksum: of its files, which tells autoencoders apart.
    """

    folder: Path
    network: Any
    channels: int
    factor: int
    scaling: float
    shift: float
    checksum: str

    @staticmethod
    def load(folder: str | Path, device: str = "cpu") -> Autoencoder:
        """The autoencoder in a local folder; nothing is downloaded.

        Raises:
            DataError: it is no AutoencoderKL. ResultsError: it lacks weights. MissingExtraError: diffusers is missing.
        """
        folder = Path(folder)
        config = read_json(folder / "config.json", DataError, "vae", ALLOWED, "Check the path.")
        kind = config.get("_class_name") if isinstance(config, dict) else None
        if kind != "AutoencoderKL":
            raise DataError("vae", f"{folder}, a {kind}", ALLOWED, "Point at the autoencoder's own folder (vae/).")
        library = load_library("diffusers")
        try:
            network = load_whole(library.AutoencoderKL, folder, "vae")[0].to(device).eval()
        except PolymixError:
            raise
        except Exception as error:  # whatever the library raises on a damaged folder
            got = f"{folder}, which cannot be read ({one_line(error)[:200]})"
            raise DataError("vae", got, ALLOWED, "Fetch it again.") from error
        options = network.config
        digest = hashlib.sha256()
        for path in sorted([folder / "config.json", *folder.glob("*.safetensors"), *folder.glob("*.bin")]):
            digest.update(path.read_bytes())
        return Autoencoder(
            folder, network.requires_grad_(False), int(options["latent_channels"]),
            2 ** (len(options["block_out_channels"]) - 1), float(options["scaling_factor"]),
            float(options.get("shift_factor") or 0), digest.hexdigest(),
        )  # fmt: skip

    def check_channels(self, channels: int, argument: str) -> None:
        """Raise OptionError unless a model of so many latent channels fits."""
        if channels != self.channels:
            got = f"{self.folder}, whose latents have {self.channels} channels"
            raise OptionError(argument, got, f"an autoencoder of {channels} channels", "Use the one of the training.")

    def check_same(self, checksum: str, argument: str) -> None:
        """Raise OptionError unless the checksum is this autoencoder's."""
        if checksum != self.checksum:
            got = f"{self.folder}, another autoencoder than that of the latents"
            raise OptionError(argument, got, "the one that made the latents", "Use it, or choose another cache.")

    @torch.no_grad()
    def encode(self, images: Tensor) -> Tensor:
        """Means and standard deviations of the latents (B, 2, C, h, w), shifted and scaled."""
        device = next(self.network.parameters()).device
        spread = self.network.encode(images.to(device)).latent_dist
        return torch.stack(((spread.mean - self.shift) * self.scaling, spread.std * self.scaling), 1).cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Pictures from -1 to 1."""
        device = next(self.network.parameters()).device
        parts = latents.float().split(DECODED_AT_ONCE)
        return torch.cat(
            [self.network.decode((part / self.scaling + self.shift).to(device)).sample.cpu() for part in parts]
        )


class Shard(TypedDict):
    """A file of latents."""

    file: str
    rows: Count
    bytes: Count
    sha256: str


class _WithLabels(TypedDict, total=False):
    labels: str


class Split(_WithLabels):
    """The files of the training or of the test pictures; `labels`, the file of their classes, comes last."""

    shards: list[Shard]


class Splits(TypedDict):
    """Both parts."""

    train: Split
    test: Split


class CacheContent(TypedDict):
    """What latents.json holds."""

    schema: Literal["polymix.latents/1"]
    finished: bool
    autoencoder: str
    image_size: Count
    shape: Annotated[list[Count], Between(3, 3)]
    flip: bool
    classes: list[str]
    pictures: int
    splits: Splits


class Cached(Dataset[Any]):
    """Latents (C, h, w) of a cache with their classes: means, or with draws=True drawn, half of them mirrored."""

    def __init__(self, folder: Path, split: Mapping[str, Any], draws: bool) -> None:
        self.files = [folder / shard["file"] for shard in split["shards"]]
        self.rows = [int(shard["rows"]) for shard in split["shards"]]
        self.labels, self.draws = read_array(folder / split["labels"]), draws
        self.open: dict[int, Any] = {}

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, place: int) -> tuple[Tensor, int]:
        if not 0 <= place < len(self):
            raise IndexError(place)  # which ends a loop over the samples
        shard, row = divmod(place, SHARD)
        if shard not in self.open:
            self.open[shard] = read_array(self.files[shard], mapped=True)
        views = self.open[shard][row]
        view = int(torch.randint(len(views), ())) if self.draws else 0
        mean, std = torch.from_numpy(views[view].astype(numpy.float32))
        return mean + std * torch.randn(std.shape) if self.draws else mean, int(self.labels[place])


@dataclass(frozen=True)
class Cache:
    """A cache of latents: its folder and what its latents.json says."""

    folder: Path
    content: Mapping[str, Any]

    @property
    def classes(self) -> tuple[str, ...]:
        return tuple(self.content["classes"])

    @property
    def shape(self) -> tuple[int, int, int]:
        channels, height, width = self.content["shape"]
        return channels, height, width

    def split(self, name: str, draws: bool = False) -> Cached:
        """The latents of "train" or "test"."""
        return Cached(self.folder, self.content["splits"][name], draws)

    @staticmethod
    def read(folder: Path, argument: str = "data") -> Cache:
        """The cache in a folder. Raises DataError: it is none, unfinished, or a file is missing or of another size."""
        content = _checked(folder, argument, "Write it again with --set vae=FOLDER.")
        if not content["finished"]:
            cure = "Continue it with the same command and --set cache=."
            raise DataError(argument, f"{folder}, which is not finished", "a finished cache", cure)
        for problem in _problems(folder, content, whole=False).lines:
            raise DataError(argument, problem, "sound files", "Write the cache again.")
        return Cache(folder, content)


def _checked(folder: Path, argument: str, cure: str) -> dict[str, Any]:
    """What latents.json says. Raises DataError where a part is missing or of another type."""
    content = read_json(folder / MANIFEST, DataError, argument, CACHED, cure)
    if not isinstance(content, dict) or content.get("schema") != schema_name(CacheContent):
        raise DataError(argument, f"{folder / MANIFEST} of another program or version", CACHED, cure)
    if wrong := wrong_part(content, CacheContent):
        raise DataError(argument, f"{folder / MANIFEST} with {wrong}", CACHED, cure)
    return content


def _problems(folder: Path, content: Mapping[str, Any], whole: bool) -> Problems:
    """What is wrong with the files of a cache; with `whole` by their checksums, which reads all of them."""
    problems = Problems()
    for name in SPLITS:
        split = content["splits"][name]
        for shard in split["shards"]:
            path = folder / shard["file"]
            if not path.is_file() or path.stat().st_size != shard["bytes"]:
                problems.add(path, "", "another size than written" if path.is_file() else "missing")
            elif whole and sha256(path) != shard["sha256"]:
                problems.add(path, "", "other content than written (checksum)")
        if "labels" not in split or not (folder / split["labels"]).is_file():
            problems.add(folder, "", f"no classes of the {name} latents")
    return problems


def check_cache(folder: Path) -> list[str]:
    """All problems of a cache, by the checksums of its files."""
    try:
        return _problems(folder, Cache.read(folder).content, whole=True).lines
    except DataError as error:
        try:
            content = _checked(folder, "data", "")
        except DataError:
            return [str(error)]
        return _problems(folder, content, whole=True).lines if content["finished"] else [str(error)]


def write_cache(
    folder: Path, parts: Sequence[Any], classes: Sequence[str], autoencoder: Autoencoder, size: int, flip: bool,
    listing: int, say: Callable[[str], None],
) -> Cache:  # fmt: skip
    """The latents of pictures, written once; an interrupted run continues after its last file.

    Each file has at most 1,024 pictures: float16 (pictures, views, 2, C, h, w), views being the picture and, with flip,
    its mirror image, then mean and standard deviation.

    Args:
        parts: training and test pictures, data sets of (image, class). size: their side in pixels.
        listing: tells other pictures or classes apart.
    Raises:
        OptionError: the folder has the latents of another autoencoder. DataError: of other pictures, or pictures whose
            side the autoencoder does not divide.
    """
    if size % autoencoder.factor:
        allowed = f"a multiple of {autoencoder.factor}, as {autoencoder.folder} takes"
        raise OptionError("image_size", size, allowed, "Change it.")
    shape = [autoencoder.channels, size // autoencoder.factor, size // autoencoder.factor]
    content: dict[str, Any] = {
        "schema": schema_name(CacheContent), "finished": False,
        "autoencoder": autoencoder.checksum, "image_size": size, "shape": shape,
        "flip": flip, "classes": list(classes), "pictures": listing,
        "splits": {name: {"shards": []} for name in SPLITS},
    }  # fmt: skip
    if (_begun(folder, content, autoencoder) or content)["finished"]:
        return Cache.read(folder, "cache")
    with output_folder(folder, "cache"):
        content = _begun(folder, content, autoencoder) or content  # another process may have finished it meanwhile
        if not content["finished"]:
            remove_unfinished(folder)
            _fill(folder, content, parts, autoencoder, flip, say)
    return Cache.read(folder, "cache")


def _begun(folder: Path, content: Mapping[str, Any], autoencoder: Autoencoder) -> dict[str, Any] | None:
    """What latents.json of an earlier run with the same settings says; None where there is none."""
    if not (folder / MANIFEST).is_file():
        return None
    earlier = _checked(folder, "cache", "Choose another folder.")
    autoencoder.check_same(earlier["autoencoder"], "vae")
    for name in ("image_size", "flip", "classes", "pictures"):
        if earlier[name] != content[name]:
            got = f"{folder}, a cache with other {name}"
            raise DataError("cache", got, "one of the same pictures", "Choose another folder with --set cache=.")
    return earlier


def _fill(
    folder: Path, content: dict[str, Any], parts: Sequence[Any], autoencoder: Autoencoder, flip: bool,
    say: Callable[[str], None],
) -> None:  # fmt: skip
    """Write what is missing, and after each file the manifest."""
    manifest = folder / MANIFEST
    for name, part in zip(SPLITS, parts, strict=True):
        split = content["splits"][name]
        for start in range(len(split["shards"]) * SHARD, len(part), SHARD):
            places = list(range(start, min(start + SHARD, len(part))))
            rows = []
            for images, _ in batches(part, places):
                views = [images, images.flip(-1)] if flip else [images]
                rows.append(torch.stack([autoencoder.encode(view) for view in views], 1))
            path = folder / f"{name}-{start // SHARD:05d}.npy"
            write_array(path, torch.cat(rows).half().numpy())
            split["shards"].append({"file": path.name, "rows": len(places), "bytes": path.stat().st_size,
                                    "sha256": sha256(path)})  # fmt: skip
            write_whole(manifest, json.dumps(content) + "\n")
            say(f"Latents: {places[-1] + 1:,} of {len(part):,} {name} pictures")
        split["labels"] = f"{name}-labels.npy"
        write_array(folder / split["labels"], numpy.asarray([int(label) for label in part.labels]))
    content["finished"] = True
    write_whole(manifest, json.dumps(content) + "\n")
