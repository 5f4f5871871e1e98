"""The domains: entry points of the group "polymix.tasks", each of which names a recipe; the recipe names its task.

A package of its own adds a domain by such an entry point; nothing else needs to know where a domain stands. Domains of
polymix keep their names: one of another package with the same name is not used.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

from polymix.errors import OptionError, one_line
from polymix.files import is_file, load_python
from polymix.train.recipe import Recipe

GROUP = "polymix.tasks"
_NAMES = {
    "classify": "Classify", "detect": "Detect", "instances": "Instances", "segment": "Segment", "faces": "Faces",
    "jigsaw": "Jigsaw", "handwriting": "Handwriting", "satellite": "Satellite", "segment3d": "Segment3d",
    "detect3d": "Detect3d", "timeseries": "Timeseries", "video": "Video", "depth": "Depth", "speech": "Speech",
    "generation": "Generation", "text": "Text", "recall": "Recall",
}  # fmt: skip
OWN_RECIPES = {name: f"polymix.domains.{name}.recipe:{kind}Recipe" for name, kind in _NAMES.items()}


@cache
def _offered(places: tuple[str, ...]) -> tuple[EntryPoint, ...]:
    """The entry points of packages in these folders: reading them opens a file of every package there is."""
    return tuple(entry_points(group=GROUP))


def domains() -> dict[str, EntryPoint]:
    """Every domain by name: polymix's own, which need no installation, then those of other packages."""
    points = {name: EntryPoint(name, value, GROUP) for name, value in OWN_RECIPES.items()}
    for point in _offered(tuple(sys.path)):
        points.setdefault(point.name, point)
    return points


def shadowed() -> dict[str, str]:
    """Packages that offer a domain under a name of polymix's own, by that name."""
    others = (
        point
        for point in _offered(tuple(sys.path))
        if point.name in OWN_RECIPES and point.value != OWN_RECIPES[point.name]
    )
    return {point.name: point.dist.name if point.dist else point.value for point in others}


def recipe_class(name: str) -> type[Recipe]:
    """The recipe of a domain. Raises OptionError: there is no such domain, or its package cannot be loaded."""
    known = domains()
    if name not in known:
        near = difflib.get_close_matches(Path(name).stem, known, 1)  # also where it looks like a file
        cure = f"Did you mean {near[0]}?" if near else "polymix train --help shows how to name a file."
        raise OptionError("domain", repr(name), f"one of {', '.join(sorted(known))}, or a file", cure)
    point = known[name]
    try:
        kind = point.load()
        if not (isinstance(kind, type) and issubclass(kind, Recipe)):
            raise TypeError(f"{point.value} is no Recipe")
    except Exception as error:  # whatever a foreign package raises when it is imported
        if name in OWN_RECIPES:
            raise
        package = point.dist.name if point.dist else point.value
        got = f"{name} of the package {package}, which cannot be loaded ({one_line(error)[:200]})"
        raise OptionError("domain", got, "a domain that loads", f"Mend or remove {package}.") from error
    return kind


def domain_of(recipe: Recipe) -> str:
    """The name of a recipe's domain: that of its task."""
    return str(task_class(recipe).name)


def task_class(recipe: Recipe) -> Any:
    """The class of a recipe's task, which needs PyTorch.

    Raises OptionError: the recipe names none, or one under another name than the entry point of the recipe has.
    """
    kind = type(recipe)
    allowed, cure = "a recipe whose `task` is 'package.module:Class'", "See CONTRIBUTING.md."
    module, _, name = recipe.own_task.partition(":")
    if not name:
        raise OptionError("recipe", f"{kind.__qualname__}, which names no task", allowed, cure)
    try:
        task = getattr(import_module(module), name)
    except (ModuleNotFoundError, AttributeError) as error:
        if isinstance(error, ModuleNotFoundError) and not f"{module}.".startswith(f"{error.name}."):
            raise  # another package is missing
        got = f"{kind.__qualname__}, whose task cannot be loaded ({one_line(error)[:200]})"
        raise OptionError("recipe", got, allowed, cure) from error
    # A trained model is found by the name of its task.
    names = [known for known, point in domains().items() if point.value == f"{kind.__module__}:{kind.__qualname__}"]
    own = getattr(task, "name", None)
    if names and isinstance(own, str) and own not in names:
        got = f"{task.__qualname__} with name = {own!r}"
        raise OptionError("task", got, f"the name of its entry point, {' or '.join(map(repr, names))}", cure)
    return task


def task_of(domain: str, say: Callable[[str], None] = lambda text: None, **options: Any) -> Any:
    """The task of a domain with options by name, for use without a training, which needs PyTorch."""
    recipe = recipe_class(domain).make(options)
    return task_class(recipe)(recipe, say)


def named_recipe(name: str | Path, options: Mapping[str, Any] | None = None) -> Recipe:
    """The recipe of a domain, or in a file: Python that sets `recipe`, which is run, or TOML, YAML or JSON with `task`.

    options: changes to it, by name.
    """
    from polymix.train.recipe_files import SUFFIXES, read_options

    path = Path(name)
    if str(name) in domains() or not is_file(path):
        return recipe_class(str(name)).make(options or {})
    if path.suffix.lower() in SUFFIXES:
        content = read_options(path)
        if "task" not in content:
            raise OptionError("recipe", f"{path} without a task", "a file with task, such as task: text", "Add it.")
        return recipe_class(str(content.pop("task"))).make({**content, **(options or {})})
    recipe = getattr(load_python(path, "recipe"), "recipe", None)
    if not isinstance(recipe, Recipe):
        got = f"{path}, in which it is {type(recipe).__name__}"
        raise OptionError(
            "recipe", got, "a file that sets recipe, such as recipe = TextRecipe()", "See CONTRIBUTING.md."
        )
    return recipe.changed(**options) if options else recipe


def chosen_recipe(
    name: str | Path, *, preset: str | None = None, config: Path | None = None, options: Mapping[str, Any] | None = None
) -> Recipe:
    """The recipe of a domain or a file as the command line changes it: the preset, then the file, then options.

    Raises OptionError: the recipe, the preset or an option is unknown or out of range, or both steps and epochs are
    given.
    """
    from polymix.train.recipe_files import read_options

    options = dict(options or {})
    if options.get("steps") is not None and options.get("epochs") is not None:
        got = f"both epochs={options['epochs']} and steps"
        raise OptionError("epochs", got, "one of the two", "Leave one out.")
    recipe = named_recipe(name)
    recipe = recipe if preset is None else recipe.preset(preset)
    if config is not None:
        options = {**{key: value for key, value in read_options(config).items() if key != "task"}, **options}
    return recipe.changed(**options) if options else recipe


def options_of(words: Sequence[str], flags: Mapping[str, Any]) -> dict[str, Any]:
    """Options by name from flags and from words such as "steps=200". OptionError for one that comes twice."""
    options = {name: value for name, value in flags.items() if value is not None}
    for word in words:
        name, sign, value = word.partition("=")
        name = name.replace("-", "_")
        if not sign or not name or not value:
            raise OptionError("set", repr(word), "option=value, such as steps=200", "Write it without spaces.")
        if name in options:
            got = f"both {options[name]!r} and {value!r}"
            raise OptionError(name, got, "the option once", f"Leave --set {name}= out.")
        options[name] = value
    return options
