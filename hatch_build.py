"""Adds the C kernels to the wheel, where there is a compiler."""

import importlib.util
import platform
import re
from pathlib import Path

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class KernelsHook(BuildHookInterface):
    def initialize(self, version, build_data):
        if self.target_name != "wheel":
            return
        path = Path(self.root) / "polymix" / "ops" / "native" / "compile.py"
        spec = importlib.util.spec_from_file_location("polymix_compile", path)
        compiler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(compiler)
        try:
            libraries = compiler.build()
        except compiler.CompileError as error:
            self.app.display_warning(f"polymix is installed without its C kernels, and runs plain PyTorch: {error}")
            return
        build_data["artifacts"].append("polymix/ops/native/libraries/*.so")
        build_data["pure_python"] = False
        build_data["tag"] = f"py3-none-manylinux_2_{_newest_glibc(libraries)}_{platform.machine()}"


def _newest_glibc(libraries):
    """The minor version of the newest glibc that the libraries ask for; 17 at least, the oldest that pip knows."""
    needed = {int(minor) for library in libraries for minor in re.findall(rb"GLIBC_2\.(\d+)", library.read_bytes())}
    return max(needed | {17})
