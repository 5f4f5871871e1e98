"""Runs the command line in this process up to the point where its work would begin."""

import contextlib
import io
import socket
from pathlib import Path
from pkgutil import resolve_name
from typing import NamedTuple
from unittest.mock import patch

from polymix.cli import main

TEXT = "The quick brown fox jumps over the lazy dog. " * 40
MODEL = """
import torch
from torch import nn


def build(dim=8, classes=3):
    layer = nn.TransformerEncoderLayer(dim, 2, 16, batch_first=True)
    return nn.TransformerEncoder(layer, 1, enable_nested_tensor=False), torch.randn(2, 5, dim)


def vit():
    from polymix import SoftmaxConfig
    from polymix.models import VisionTransformer

    return VisionTransformer(SoftmaxConfig(heads=2), image_size=8, patch_size=2, dim=8, depth=1, classes=10, channels=1)


def layer():
    return nn.Linear(8, 8)


def text():
    return "no model"


def crash():
    raise KeyError("boom\\nboom")


def leave():
    raise SystemExit(3)
"""
# Where each verb's work begins: module and function. After these calls nothing is refused any more.
WORK = (
    ("polymix.workflows.compare.run", "train"),
    ("polymix.workflows.bench.run", "MemoryProcess"),
    ("polymix.workflows.recommend.run", "_advise"),
    ("polymix.workflows.convert.run", "_learn"),
    ("polymix.workflows.convert.run", "assess"),
    ("polymix.workflows.generate.run", "TextStreamer"),
    ("polymix.train.run", "fit"),
    ("polymix.workflows.show", "interleaved"),
    ("polymix.lens.probe:Probe", "normal"),
    ("polymix.ops.native.compile", "build"),
)


class Reached(BaseException):
    """The command has accepted its arguments and begins its work."""


class Outcome(NamedTuple):
    status: object
    out: str
    err: str

    @property
    def refused(self):
        """One line on standard error, from us, and status 2."""
        return self.status == 2 and len(self.err.splitlines()) == 1 and self.err.startswith("polymix: ")

    @property
    def message(self):
        return self.err.removeprefix("polymix: ")


def stop(*args, **kwargs):
    raise Reached


def _no_socket(*args, **kwargs):
    raise AssertionError("a socket was opened")


@contextlib.contextmanager
def offline():
    """No sockets."""
    with patch.object(socket.socket, "connect", _no_socket), patch.object(socket, "create_connection", _no_socket):
        yield


def run(arguments, work=WORK):
    """The outcome of a command: its exit status, or "reached" where it accepts its arguments."""
    out, err = io.StringIO(), io.StringIO()
    with contextlib.ExitStack() as stack:
        for module, name in work:
            stack.enter_context(patch.object(resolve_name(module), name, stop))
        stack.enter_context(offline())
        stack.enter_context(contextlib.redirect_stdout(out))
        stack.enter_context(contextlib.redirect_stderr(err))
        try:
            main([str(word) for word in arguments])
            status = 0
        except SystemExit as end:
            status = end.code or 0
        except Reached:
            status = "reached"
    return Outcome(status, out.getvalue(), err.getvalue())


def tree(folder):
    """Every file below a folder with its content, and every folder."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() if path.is_file() else None
            for path in sorted(Path(folder).rglob("*")) if not path.is_symlink()}  # fmt: skip
