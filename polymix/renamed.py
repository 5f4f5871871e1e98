"""Old names of modules and of what they hold. Each still works and warns with the new name."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

MODULES = {
    "polymix.bench": "polymix.measure",
    "polymix.bench.floor": "polymix.measure.floor",
    "polymix.bench.machine": "polymix.measure.machine",
    "polymix.bench.measure": "polymix.measure.timing",
    "polymix.bench.roofline": "polymix.measure.roofline",
    "polymix.bench.sweep": "polymix.measure.sweep",
    "polymix.compare": "polymix.workflows",
    "polymix.compare.conversion": "polymix.workflows.convert",
    "polymix.compare.conversion.language": "polymix.workflows.convert.language",
    "polymix.compare.recommend": "polymix.workflows.recommend",
    "polymix.compare.verdict": "polymix.workflows.compare.verdict",
    "polymix.convert.attention": "polymix.convert.spec",
    "polymix.convert.differences": "polymix.convert.saving.rebuild",
    "polymix.convert.files": "polymix.convert.saving.files",
    "polymix.convert.libraries": "polymix.convert.adapters.libraries",
    "polymix.convert.plain": "polymix.convert.model_recipes",
    "polymix.convert.rebuild": "polymix.convert.saving.rebuild",
    "polymix.convert.record": "polymix.convert.tracing",
    "polymix.convert.replay": "polymix.convert.tracing",
    "polymix.lens.contextual": "polymix.lens.contextual_mapping",
    "polymix.lens.field": "polymix.lens.receptive_field",
    "polymix.structured.fanout": "polymix.structured.parallel_linear",
    "polymix.mixers.base": "polymix.mixers.mixer",
    "polymix.models.language.attention": "polymix.models.language.layers",
    "polymix.models.language.block": "polymix.models.language.layers",
    "polymix.models.language.fill": "polymix.models.language.model",
    "polymix.models.language.layer": "polymix.models.language.layers",
    "polymix.models.language.order": "polymix.models.language.layout",
    "polymix.models.language.presets": "polymix.models.language.config",
    "polymix.models.language.pretrained": "polymix.models.language.model",
    "polymix.tasks.distill.order": "polymix.tasks.order",
    "polymix.tasks.images.classifier": "polymix.tasks.classify.classifier",
    "polymix.tasks.images.influence": "polymix.tasks.classify.influence",
    "polymix.tasks.images.training": "polymix.tasks.classify.training",
    "polymix.tasks.influence": "polymix.tasks.classify.influence",
    "polymix.tasks.recall.training": "polymix.tasks.recall.learner",
    "polymix.tasks.text.corpus": "polymix.tasks.text.data",
    "polymix.tasks.text.evaluate": "polymix.tasks.text.metrics",
    "polymix.tasks.text.packing": "polymix.tasks.text.tokens",
    "polymix.tasks.text.prepare": "polymix.tasks.text.data",
    "polymix.tasks.text.processes": "polymix.tasks.processes",
    "polymix.tasks.text.shards": "polymix.tasks.text.tokens",
    "polymix.workflows.generate.settings": "polymix.workflows.generate.run",
    "polymix.workflows.numbers": "polymix.numbers",
    "polymix.workflows.pages": "polymix.pages",
    "polymix.workflows.plots": "polymix.pages.plots",
}


def renamed(module: str, **names: str) -> Callable[[str], Any]:
    """A module's `__getattr__` that finds old names by new ones: `__getattr__ = renamed(__name__, Old="New")`."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {module!r} has no attribute {name!r}")
        warn_renamed(f"{module}.{name}", f"{module}.{names[name]}")
        return getattr(sys.modules[module], names[name])

    return find


def renamed_from(package: str, module: str, *names: str) -> Callable[[str], Any]:
    """A package's `__getattr__` that finds `names` in another module, with a warning that names it."""

    def find(name: str) -> Any:
        if name not in names:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        warn_renamed(f"{package}.{name}", f"{module}.{name}")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of the module's own old names
            return getattr(importlib.import_module(module), name)

    return find


def warn_renamed(old: str, new: str) -> None:
    """Warn at the caller's caller: the line that uses the old name."""
    text = f"{old} is now called {new}; the old name will be removed."
    warnings.warn(text, DeprecationWarning, stacklevel=3)


class _OldModules(MetaPathFinder, Loader):
    """Imports an old module's name as a module that hands on to the new one."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        return importlib.util.spec_from_loader(name, self, is_package=True) if name in MODULES else None

    def exec_module(self, module: ModuleType) -> None:
        old = module.__name__
        new = importlib.import_module(MODULES[old])
        if not any(other.startswith(f"{old}.") for other in MODULES):  # a package is loaded on the way to its modules
            warn_renamed(old, MODULES[old])
        module.__getattr__ = lambda name: getattr(new, name)  # type: ignore[method-assign]


sys.meta_path.append(_OldModules())
