"""The machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch

from polymix import threads as cpu_threads


def _cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()


def manifest(device: str, threads: int) -> dict[str, Any]:
    """Hardware, versions and threads, as every results file records them."""
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


def busy() -> str:
    """A sentence where other programs use the cores, so that times are too long; empty where nothing is known of it."""
    if not cpu_threads.is_busy():
        return ""
    return f"{cpu_threads.crowd()}, so times are too long."
