"""Text from language models: `generate` by what `load` found in a folder, with `Settings`."""

from polymix.workflows.generate.folder import load
from polymix.workflows.generate.run import Clock, generate
from polymix.workflows.generate.settings import Settings

__all__ = ["Clock", "Settings", "generate", "load"]
