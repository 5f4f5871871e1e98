"""A hook of MkDocs: runs the Python blocks of a page and shows what they print below them.

The blocks of a page share one namespace. A block that fails stops the build with the page and line of the error.

What a page prints is kept in .cache/blocks, so that the next build runs only the pages whose blocks have changed. All
pages run again when the package's sources or the installed packages change; delete the folder to run them anyway.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import re
from collections.abc import Iterator
from functools import cache
from importlib.metadata import distributions
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

import polymix
from polymix.compat import cure_torchvision
from polymix.convert import adapter
from polymix.convert.adapters.libraries import LIBRARIES
from polymix.files import write_whole
from polymix.mixers import registry

ROOT = Path(__file__).parents[2]
CACHE = ROOT / ".cache" / "blocks"
BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


@contextlib.contextmanager
def forgotten() -> Iterator[None]:
    """Forget what is registered within: no page depends on another, and each may run again in the same process."""
    polymix.list_mixers()
    for library in LIBRARIES.values():  # what the package registers itself, once in a process, must stay
        library.load_adapters()
    with patch.dict(adapter._ADAPTERS), patch.dict(adapter._REFUSALS), patch.dict(registry._CONFIGS):
        yield


@forgotten()
def run(markdown: str, page: str) -> list[str]:
    """Run the blocks of a page, in order. Returns what each of them prints."""
    cure_torchvision()  # a CUDA build beside a CPU build of torch; users have installed both from one index
    namespace: dict[str, Any] = {"__name__": page}
    torch.manual_seed(0)
    outputs = []
    for block in BLOCK.finditer(markdown):
        # as many empty lines in front as in the page, so that an error names the right line
        code = "\n" * (markdown.count("\n", 0, block.start()) + 1) + block[1]
        output = io.StringIO()
        with contextlib.redirect_stdout(output):
            exec(compile(code, page, "exec"), namespace)
        outputs.append(output.getvalue().rstrip())
    return outputs


def with_outputs(markdown: str, outputs: list[str]) -> str:
    """The page with each block's output below it."""
    remaining = iter(outputs)

    def add(block: re.Match[str]) -> str:
        output = next(remaining)
        style = ".text" if "  " in output else ".text .wrapped"  # columns would not survive
        return block[0] + (f'\n```{{ {style} title="prints" }}\n{output}\n```\n' if output else "")

    return BLOCK.sub(add, markdown)


@cache
def environment() -> str:
    """A hash of all that a block's output depends on besides the blocks: the package, this hook, what is installed."""
    digest = hashlib.sha256(Path(__file__).read_bytes())
    for path in sorted(ROOT.joinpath("polymix").rglob("*")):
        if path.is_file() and path.suffix != ".pyc":
            digest.update(str(path.relative_to(ROOT)).encode() + path.read_bytes())
    installed = sorted(f"{package.name} {package.version}" for package in distributions())
    digest.update("\n".join(installed).encode())
    return digest.hexdigest()


def cached(markdown: str, page: str) -> list[str]:
    """As `run`, from the cache where these very blocks have run before."""
    key = json.dumps([page, environment(), BLOCK.findall(markdown)])
    path = CACHE / f"{hashlib.sha256(key.encode()).hexdigest()}.json"
    if path.exists():
        return list(json.loads(path.read_text(encoding="utf-8")))
    outputs = run(markdown, page)
    CACHE.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(outputs))
    return outputs


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    if not BLOCK.search(markdown):
        return markdown
    return with_outputs(markdown, cached(markdown, page.file.src_uri))
