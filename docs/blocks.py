"""Runs the ```python blocks of a page, one namespace a page, and puts what they print under them: a hook of MkDocs.

A block that fails stops the build, and names its page.
"""

from __future__ import annotations

import contextlib
import io
import re
from typing import Any

import torch

BLOCK = re.compile(r"^```python\n(.*?)^```\n", re.DOTALL | re.MULTILINE)


def run(markdown: str, page: str) -> str:
    scope: dict[str, Any] = {"__name__": page}
    torch.manual_seed(0)

    def with_output(found: re.Match[str]) -> str:
        # as many lines in front as in the file, so that an error names the right one
        code = "\n" * (markdown.count("\n", 0, found.start()) + 1) + found[1]
        said = io.StringIO()
        with contextlib.redirect_stdout(said):
            exec(compile(code, page, "exec"), scope)
        printed = said.getvalue().rstrip()
        return found[0] + (f'\n```text title="prints"\n{printed}\n```\n' if printed else "")

    return BLOCK.sub(with_output, markdown)


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    return run(markdown, page.file.src_uri)
