"""Cures for a torchvision built for another PyTorch: in this process alone, or for good in the environment.

PyPI's torchvision is built for CUDA. Beside a CPU-only torch its import fails with "operator torchvision::nms does not
exist", and timm, transformers and torchmetrics, which import it where it is installed, fail with it. Its CPU build
fits. Both cures define the operators that are missing, of which `nms` and `roi_align` get an implementation in PyTorch
(`polymix.torchvision_operators`), so that torchvision's detectors (Mask R-CNN, RetinaNet, FCOS) train and predict on
the CPU. Its other compiled operators still cannot be called.
"""

from __future__ import annotations

import importlib
import importlib.metadata
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import torch

from polymix import torchvision_operators
from polymix.errors import MissingExtraError, OptionError, reason_of
from polymix.extras import is_installed
from polymix.files import write_whole
from polymix.torchvision_operators import nms as nms

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
_MISSING_OPERATOR = "operator torchvision::"  # how the error begins that can be cured
_MARK = "# ---- Added by `polymix doctor --fix`; installing torchvision again removes it."
_PATCH = """
if not _has_ops():
    define()
    import torchvision.ops

    enable()
"""


def cure_torchvision() -> bool:
    """Make a torchvision whose compiled operators do not load importable in this process.

    Returns:
        True if that was necessary; False if torchvision is missing or works.
    """
    if not is_installed("torchvision"):
        return False
    try:
        importlib.import_module("torchvision")
        return False
    except RuntimeError as error:
        if _MISSING_OPERATOR not in str(error):
            raise
    for name in [name for name in sys.modules if name.split(".")[0] == "torchvision"]:
        del sys.modules[name]
    torchvision_operators.define()
    importlib.import_module("torchvision")
    torchvision_operators.enable()
    return True


def mend_torchvision() -> str:
    """Make the installed torchvision importable for every program of this environment, also without polymix.

    The operators, and a line that defines them where torchvision's own do not load, are added to the end of its file
    extension.py: whole, or not at all. Installing torchvision again removes them.

    Returns:
        What was changed, and how to undo it; or that it was mended before.

    Raises:
        MissingExtraError: torchvision is not installed. OptionError: it works, it fails for another reason, its file
            cannot be written, or the change does not cure it; nothing is changed.
    """
    if not is_installed("torchvision"):
        raise MissingExtraError("torchvision", "detection")
    version = importlib.metadata.version("torchvision")
    file = _extension()
    before = file.read_bytes() if file is not None else b""
    failure = _import_alone()
    if failure is None:
        if _MARK.encode() in before:
            return f"torchvision {version} works: {file} was mended before."
        got = f"torchvision {version}, which works"
        raise OptionError("--fix", got, "one that cannot be imported", "Leave it out.")
    if file is None or _MISSING_OPERATOR not in failure or _MARK.encode() in before:
        got, cure = f"torchvision {version}, which fails with {failure}", f"Install it again: {cpu_build(version)}"
        raise OptionError("--fix", got, "one that lacks operators alone", cure)
    source = Path(torchvision_operators.__file__).read_text("utf-8")
    try:
        write_whole(file, before + f"\n\n{_MARK}\n{source}{_PATCH}".encode())
        failure = "an interruption"
        try:
            failure = _import_alone()
        finally:
            if failure is not None:
                write_whole(file, before)
    except OSError as error:
        got, cure = f"{file}, which cannot be written ({reason_of(error)})", "Run it as the owner of the environment."
        raise OptionError("--fix", got, "an environment of your own", cure) from error
    if failure is not None:
        got = f"torchvision {version}, which then fails with {failure}"
        raise OptionError("--fix", got, "a torchvision that this cures", f"Install it again: {cpu_build(version)}")
    return (
        f"torchvision {version} was built for another PyTorch, and now works: nms and roi_align in PyTorch were added "
        f"to the end of {file}. Undo it with: pip install --force-reinstall --no-deps torchvision=={version}"
    )


def cpu_build(version: str) -> str:
    """The command that installs torch's and torchvision's CPU builds, which fit together."""
    return f"pip install torch=={torch.__version__.partition('+')[0]} torchvision=={version} --index-url {CPU_INDEX}"


def _extension() -> Path | None:
    """The file of torchvision that loads its operators."""
    spec = find_spec("torchvision")
    for folder in (spec and spec.submodule_search_locations) or ():
        if (Path(folder) / "extension.py").is_file():
            return Path(folder) / "extension.py"
    return None


def _import_alone() -> str | None:
    """Import torchvision in a process of its own. Returns the last line of the error, or None."""
    command = [sys.executable, "-W", "ignore", "-c", "import torchvision"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stderr.strip().splitlines()
    return None if run.returncode == 0 else lines[-1] if lines else f"exit status {run.returncode}"
