"""A plugin of pytest that writes each launch of a Triton kernel that the tests make, once, to the file $LAUNCHES.

Of a tensor it keeps what a compiler is told of it: the dtype, and whether its address is a multiple of 16. With $AMD,
the launches are those of a PyTorch for AMD's cards.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch

WRITTEN: set[str] = set()


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return {"dtype": str(value.dtype).removeprefix("torch."), "address": value.data_ptr() % 16}
    return value


def pytest_configure() -> None:
    from triton.runtime.interpreter import InterpretedFunction

    if "AMD" in os.environ:
        torch.version.hip = "6.4"
    run = InterpretedFunction.run

    def recorded(self: Any, *args: Any, grid: Any, **kw: Any) -> Any:
        if kw.get("warmup"):
            return run(self, *args, grid=grid, **kw)
        named = {**dict(zip(self.arg_names, args, strict=False)), **{k: v for k, v in kw.items() if k != "warmup"}}
        launch = {"module": self.fn.__module__, "kernel": self.fn.__name__, "grid": list(grid)}
        launch["arguments"] = {name: _described(value) for name, value in named.items()}
        line = json.dumps(launch)
        if line not in WRITTEN:
            WRITTEN.add(line)
            with Path(os.environ["LAUNCHES"]).open("a", encoding="utf-8") as file:
                file.write(line + "\n")
        return run(self, *args, grid=grid, **kw)

    InterpretedFunction.run = recorded  # type: ignore[method-assign]
