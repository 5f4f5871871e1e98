"""A module of the user's own by "file.py:function"."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from pathlib import Path
from typing import Any

from polymix.errors import OptionError


def load(name: str, options: dict[str, Any]) -> Callable[..., Any]:
    """What `function(**options)` of a Python file returns: a module, or a function of one tensor."""
    module = called(name, options)
    if not callable(module):
        raise OptionError("NAME", f"{name}, which returns {type(module).__name__}", "one that returns a module", "")
    return module


def called(name: str, options: dict[str, Any]) -> Any:
    """What `function(**options)` of a Python file returns.

    Raises OptionError, naming the file, for whatever goes wrong on the way.
    """
    file, _, function = name.rpartition(":")
    path = Path(file)
    if not path.is_file() or not function:
        raise OptionError("NAME", repr(name), "an existing file.py and a function in it", "Write file.py:function.")
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None  # of a file that ends in .py
    source = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(source)
        return getattr(source, function)(**options)
    except Exception as error:  # any error of the user's own code is one line here
        reason = f"{type(error).__name__}: {' '.join(str(error).split())}"
        got = f"{name}, which fails with {reason}"
        raise OptionError("NAME", got, "a function that returns a module", "") from error
