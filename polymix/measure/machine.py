"""The machine that a measurement was made on."""

from __future__ import annotations

import os
import platform
from pathlib import Path
from typing import Any

import torch


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
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load <= cores:
        return ""
    return f"The machine is busy: {load:.0f} programs wait for {cores} cores, so times are too long."
