"""Text from language models: `generate` by what `load` found in a folder, with `Settings`."""

from polymix.tasks.generate.folder import load
from polymix.tasks.generate.run import Clock, generate
from polymix.tasks.generate.settings import Settings

__all__ = ["Clock", "Settings", "generate", "load"]
