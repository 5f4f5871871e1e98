"""What polymix finds on this machine, and what would make it faster."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import shutil
from dataclasses import asdict, dataclass
from typing import Any

import torch

from polymix import compat
from polymix import threads as cpu_threads
from polymix.errors import install_extra
from polymix.extras import EXTRAS
from polymix.measure.machine import manifest
from polymix.ops.native import compile, library

_BF16 = {"avx512_bf16": "AVX-512", "amx_bf16": "AMX", "bf16": "NEON"}


@dataclass(frozen=True)
class Finding:
    """One thing that was looked at. advice: what the user can do about it; "" where nothing is amiss."""

    topic: str
    state: str
    advice: str = ""


def examine() -> list[Finding]:
    """Look at the processor, the kernels, the threads, the GPU and the libraries."""
    return [_system(), _processor(), _kernels(), _threads(), _cores(), _gpu(), *_libraries(), _torchvision()]


def as_json(findings: list[Finding]) -> dict[str, Any]:
    """The findings and the manifest that every results file has."""
    return {"machine": manifest("cpu", torch.get_num_threads()), "findings": [asdict(each) for each in findings]}


def _system() -> Finding:
    system = f"{platform.system()} {platform.machine()}"
    return Finding("system", f"{system}, Python {platform.python_version()}, PyTorch {torch.__version__}")


def _processor() -> Finding:
    name, flags = manifest("cpu", 1)["cpu"], library.processor_flags()
    level = next(iter(library.usable_levels()), "no level with C kernels")
    units = [unit for flag, unit in _BF16.items() if flag in flags]
    return Finding("processor", f"{name}; {level}; bfloat16 products: {', '.join(units) or 'none'}")


def _kernels() -> Finding:
    why = library.why_not()
    if why is None:
        return Finding("C kernels", f"{library.loaded()}")
    if os.environ.get(library.SWITCH) == "0":
        return Finding("C kernels", why, f"Unset {library.SWITCH} to use them: mixers are up to twice as fast.")
    if not library.usable_levels():
        return Finding("C kernels", why)
    cure = "Run `polymix build-kernels`" if compile.compilers() else "Install gcc, then run `polymix build-kernels`"
    return Finding("C kernels", why, f"{cure}: mixers are up to twice as fast with them.")


def _threads() -> Finding:
    threads = torch.get_num_threads()
    cores = cpu_threads.cores()
    state = f"{threads} for {cores} cores"
    limit = os.environ.get("OMP_NUM_THREADS")
    if limit:
        state += f" (OMP_NUM_THREADS={limit})"
    if threads > cores:
        return Finding("threads", state, f"Set OMP_NUM_THREADS={cores}: more threads than cores slow everything down.")
    if threads < cores and limit and not cpu_threads.is_busy():  # busy, fewer threads are faster
        return Finding("threads", state, f"Unset OMP_NUM_THREADS to use all {cores} cores.")
    return Finding("threads", state)


def _cores() -> Finding:
    """What threads share: the cores that are free, other programs, and how they wait."""
    limit = cpu_threads.quota()
    free = "no cgroup quota" if limit is None else f"a cgroup quota of {limit:g}"
    cores = f"{os.cpu_count()} of the machine, {cpu_threads.affinity()} by affinity, {free}"
    state = f"{cores}; load {cpu_threads.load():.1f}; {cpu_threads.spinning()}"
    return Finding("cores", state, cpu_threads.busy_warning(cpu_threads.free()))


def _gpu() -> Finding:
    if torch.cuda.is_available():
        name = torch.cuda.get_device_name()
        if _version("triton") is None:
            return Finding("GPU", f"{name}, no Triton", "Install triton: the GPU kernels are written in it.")
        return Finding("GPU", f"{name}, Triton {_version('triton')}")
    if shutil.which("nvidia-smi") and torch.version.cuda is None:
        cure = "Install a CUDA build of PyTorch (see pytorch.org) to use the GPU."
        return Finding("GPU", "an NVIDIA driver, but PyTorch is built for the CPU alone", cure)
    return Finding("GPU", "none that PyTorch can use; mixers run on the CPU")


def _libraries() -> list[Finding]:
    findings = []
    for name, extra in EXTRAS.items():
        versions = {package: _version(package) for package in extra.packages}
        installed = ", ".join(f"{package} {version}" for package, version in versions.items() if version)
        missing = ", ".join(package for package, version in versions.items() if version is None)
        state = "; ".join(part for part in (installed, f"missing: {missing}" * bool(missing)) if part)
        state = f"{state or 'other extras alone'} (for {extra.purpose})"
        cure = f"For what needs them, in a clone of polymix: {install_extra(name)}" if missing else ""
        findings.append(Finding(f"extra {name}", state, cure))
    return findings


def _torchvision() -> Finding:
    version = _version("torchvision")
    if version is None:
        return Finding("torchvision", "not installed")
    fitting = f"Install both from one index: {compat.cpu_build(version)}"
    if torch.version.cuda is not None:
        fitting = "Install the build that fits PyTorch's (see pytorch.org)."
    try:
        mended = compat.cure_torchvision()
    except Exception as error:
        return Finding("torchvision", f"{version} cannot be imported: {str(error).splitlines()[0]}", fitting)
    if mended:
        rest = "polymix works around it; other programs cannot import torchvision, timm or transformers."
        cure = f"{fitting}; or, without that index, mend the one that is installed: polymix doctor --fix"
        return Finding("torchvision", f"{version}, built for another PyTorch. {rest}", cure)
    return Finding("torchvision", f"{version}")


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None
