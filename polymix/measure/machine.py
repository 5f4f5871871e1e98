"""What a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from polymix.errors import OptionError


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def manifest(device: str, threads: int) -> dict[str, Any]:
    """Hardware, versions and threads, as they stand in every results file."""
    gpu = torch.cuda.get_device_name(device) if device.startswith("cuda") else None
    return {
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "cores": os.cpu_count(),
        "gpu": gpu,
        "device": device,
        "threads": threads,
        "system": f"{platform.system()} {platform.machine()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def check_device(device: str) -> str:
    """The device's name, if PyTorch can compute on it."""
    try:
        torch.zeros(1, device=device).add_(1)
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
        raise OptionError("--device", device, "a device that PyTorch can use here, such as cpu", reason) from error
    if torch.device(device).type == "meta":
        raise OptionError("--device", device, "a device that computes", "Use cpu or cuda.")
    return device
