"""Continue texts with a language model: `generate` with what `load` returns, and `Settings`."""

from polymix.workflows.generate.folder import load
from polymix.workflows.generate.run import Clock, Settings, command, generate

__all__ = ["Clock", "Settings", "command", "generate", "load"]
