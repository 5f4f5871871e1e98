"""The options of every training, and recipes as people write them: Python, JSON or YAML files, and steps=200."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from importlib import import_module
from os import PathLike
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from polymix._io import check_device, load_python, parse_options, parse_value
from polymix.convert.matching import matched_to_attention
from polymix.convert.plan import parse_plan, resolve
from polymix.errors import (
    MissingExtraError,
    OptionError,
    check_choice,
    check_int,
    check_number,
    check_seed,
    nearest_first,
)
from polymix.mixers import MixerConfig
from polymix.mixers.spec import parse_mixer
from polymix.tasks.domains import built_domains, check_domain

PRECISIONS = ("float32", "bfloat16")
STRATEGIES = ("auto", "ddp", "fsdp")
KEPT = ("last", "best")
LOGGERS = ("csv", "tensorboard", "wandb")
FORMATS = (".json", ".yaml", ".yml")
LARGEST = 1 << 20  # bytes of a recipe in JSON or YAML
ATTENTION, CONTROL = "softmax", "linear_floor"
R = TypeVar("R", bound="TaskRecipe")


@dataclass(frozen=True)
class TaskRecipe:
    """The options that all tasks share. A task's own recipe is a frozen dataclass that adds to them.

    Training is AdamW with a linear warm-up and a cosine decay.

    Args:
        data: the path that --data gives; None: the task's default data.
        batch_size: samples per step, over all processes.
        accumulate: the parts in which a step is computed, to save memory.
        steps: how many there are. epochs: passes over the training data instead, which tell the steps.
        learning_rate: the highest one.
        warmup: share of the steps in which the learning rate rises.
        final: learning rate of the last step, as a share of the highest.
        weight_decay, betas: of AdamW. Vectors, such as biases, do not decay.
        clip: largest norm of the gradient.
        ema: decay of averaged weights, which are then evaluated and saved; 0: none.
        keep: which weights are saved: "last", or "best", those of the evaluation with the best headline on the data's
            validation part. The test part is then measured once, with these weights.
        precision: "float32" or "bfloat16".
        checkpointing: compute blocks a second time in the backward pass, to save memory.
        seed: of the weights, the order of the data, and dropout.
        device: "cpu", "cuda", "cuda:1" or "mps".
        strategy: "auto", "ddp" or "fsdp"; the last two for several processes under torchrun.
        workers: processes that load data.
        log_every, evaluate_every, checkpoint_every: in steps.
        logger: "csv", "tensorboard" or "wandb", which get every row of metrics.jsonl; None: metrics.jsonl alone.
        layout: how the files of --data are arranged, one of the task's `LAYOUTS`; None: recognised by its files.
        plan: which blocks get the mixer, as `polymix.convert` takes it, such as "1:1"; the others keep attention.
        init: folder of a trained or converted model whose weights the run starts from; None: fresh weights.
        control: also train `linear_floor`, which mixes nothing; None: on the default data of most tasks.
    Raises:
        OptionError: an option is out of range.
    """

    data: str | None = None
    batch_size: int = 32
    accumulate: int = 1
    steps: int = 1000
    epochs: float | None = None
    learning_rate: float = 1e-3
    warmup: float = 0.1
    final: float = 0.1
    weight_decay: float = 0.05
    betas: Sequence[float] = (0.9, 0.95)
    clip: float = 1.0
    ema: float = 0.0
    keep: str = "last"
    precision: str = "float32"
    checkpointing: bool = False
    seed: int = 0
    device: str = "cpu"
    strategy: str = "auto"
    workers: int = 0
    log_every: int = 10
    evaluate_every: int = 100
    checkpoint_every: int = 100
    logger: str | None = None
    layout: str | None = None
    plan: str | None = None
    init: str | None = None
    control: bool | None = None

    # Options of the presets by name: "tiny", a smoke test, and "paper", the settings of the paper.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    takes_plan: ClassVar[bool] = False  # whether model.py asks `mixers_for`
    without_mixer: ClassVar[str | None] = None  # the value of `mixer` for a host of its own without a block
    trains_control: ClassVar[bool] = True  # whether control=None means True on the default data

    after_training: ClassVar[tuple[str, ...]] = ()  # options that a trained model may be used with other values of

    # Options that a resumed run may change, because they do not change the result, or because the data tells.
    changeable: ClassVar[tuple[str, ...]] = (
        "data", "device", "strategy", "workers", "log_every", "checkpoint_every", "logger", "control",
    )  # fmt: skip

    def __post_init__(self) -> None:
        for name in ("batch_size", "accumulate", "steps", "log_every", "evaluate_every", "checkpoint_every"):
            check_int(name, getattr(self, name), 1)
        check_seed("seed", self.seed)
        check_int("workers", self.workers, 0, 1024)
        for name, low, high, allowed, usual in (
            ("warmup", 0.0, 1.0, "a share below 1", 0.1), ("final", 0.0, 1.0 + 1e-9, "a share of at most 1", 0.1),
            ("ema", 0.0, 1.0, "0, or a decay below 1", 0.999), ("clip", 1e-12, math.inf, "a number above 0", 1.0),
            ("learning_rate", 1e-12, math.inf, "a number above 0", 1e-3),
            ("weight_decay", 0.0, math.inf, "a number of at least 0", 0.1),
        ):  # fmt: skip
            check_number(name, getattr(self, name), low, high, allowed, usual)
        if self.epochs is not None:
            check_number("epochs", self.epochs, 1e-9, math.inf, "a number above 0, or None", 100)
        betas = self.betas if isinstance(self.betas, (tuple, list)) else ()
        if len(betas) != 2 or not all(type(beta) in (int, float) and 0 <= beta < 1 for beta in betas):
            raise OptionError("betas", repr(self.betas), "two numbers in [0, 1)", "Pass betas=(0.9, 0.95), say.")
        if self.data is not None and not (isinstance(self.data, (str, PathLike)) and str(self.data)):
            raise OptionError("data", repr(self.data), "the path of a file or a folder, or None", "Pass data=None.")
        check_choice("precision", self.precision, PRECISIONS)
        check_choice("strategy", self.strategy, STRATEGIES)
        check_choice("keep", self.keep, KEPT)
        if self.keep == "best" and self.strategy == "fsdp":
            raise OptionError("keep", "'best' with strategy='fsdp'", "'last'", "Or pass strategy='ddp'.")
        check_choice("checkpointing", self.checkpointing, (True, False))
        check_choice("logger", self.logger, (None, *LOGGERS))
        check_choice("control", self.control, (None, True, False))
        if self.plan is not None and not self.takes_plan:
            raise OptionError("plan", repr(self.plan), "None: this task has no plans", "Choose a mixer instead.")
        check_device(self.device, kinds=("cpu", "cuda", "mps"), touch=False)
        if self.batch_size % self.accumulate:
            got = f"{self.accumulate} with batch_size={self.batch_size}"
            raise OptionError("accumulate", got, "a divisor of the batch size", "Change one of the two.")

    @property
    def part_size(self) -> int:
        """Samples that are computed at once in one process."""
        return self.batch_size // self.accumulate

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them."""
        return json.loads(json.dumps(asdict(self), default=str))

    def decisive(self) -> dict[str, Any]:
        """The options that a resumed run must not change."""
        return {name: value for name, value in self.to_dict().items() if name not in self.changeable}

    def changed(self: R, words: Sequence[str], others: Mapping[str, Any] | None = None) -> R:
        """This recipe with other options, such as ["steps=200", "betas=0.9,0.99"], and `others` by name.

        steps=… takes the place of a recipe's epochs. Raises OptionError for a word that is not option=value, an unknown
        option, a value out of range, or both steps and epochs.
        """
        options = parse_options(words, self.annotations())
        if "steps" in options and options.get("epochs") is not None:
            raise OptionError(
                "epochs", f"both epochs={options['epochs']} and steps", "one of the two", "Leave one out."
            )
        return self.with_options({**({"epochs": None} if "steps" in options else {}), **options, **(others or {})})

    def for_data(self: R, epochs_per_step: float) -> R:
        """This recipe with the steps that its `epochs` take; without epochs, as it is.

        Raises OptionError for epochs_per_step=0, where all data is made anew.
        """
        if self.epochs is None:
            return self
        if not epochs_per_step:
            raise OptionError("epochs", self.epochs, "None: every sample of this task is new", "Pass steps instead.")
        return replace(self, steps=max(1, math.ceil(round(self.epochs / epochs_per_step, 6))))

    def with_options(self: R, options: Mapping[str, Any]) -> R:
        """This recipe with other options, by name. Raises OptionError for an unknown one or a value out of range."""
        own = {field.name for field in fields(self)}
        others = {name: value for name, value in options.items() if name not in own}
        mine = {name: value for name, value in options.items() if name in own}
        return replace(self.with_others(others) if others else self, **mine)

    # Mixers and presets

    def with_mixer(self: R, mixer: str) -> R:
        """This recipe with another mixer in all layers. Raises OptionError where the task has no option `mixer`."""
        return self.with_options({"mixer": mixer})

    @property
    def mixer_name(self) -> str:
        """The mixer as results name it, with the plan where there is one."""
        mixer = str(self.to_dict()["mixer"]) if "mixer" in self.annotations() else "none"
        return f"{mixer} ({self.plan})" if self.plan else mixer

    @property
    def wants_control(self) -> bool:
        """Whether to train `linear_floor` too."""
        if self.control is None:
            return self.trains_control and self.data is None and self.mixer_name != CONTROL
        return self.control and self.mixer_name != CONTROL

    def mixers_for(self, layers: Sequence[str], match: int | None = None) -> dict[str, MixerConfig]:
        """The mixer's config for each layer: `mixer` in all of them, or where `plan` says; attention elsewhere.

        Args:
            match: give the mixer as many parameters as attention of so many channels; None: its own width.
        Raises:
            OptionError or UnknownNameError: the mixer or the plan is wrong, or the mixer cannot be matched.
        """
        mixer = parse_mixer(self.to_dict()["mixer"])[1]
        if match is not None:
            mixer = matched_to_attention(mixer, match)
        if self.plan is None:
            return dict.fromkeys(layers, mixer)
        attention = parse_mixer(ATTENTION)[1]
        found = resolve(parse_plan(self.plan), layers, mixer)
        return {name: attention if config is None else config for name, config in found.items()}

    def preset(self: R, name: str) -> R:
        """This recipe with the options of a preset. Raises OptionError for a name that the task does not have."""
        if name not in self.presets:
            allowed = ", ".join(self.presets) or "no preset for this task"
            raise OptionError(
                "preset", repr(name), allowed, "Choose one of these." if self.presets else "Leave it out."
            )
        return self.with_options(self.presets[name])

    @classmethod
    def tiny(cls: type[R]) -> R:
        """The recipe of the preset "tiny": the smallest run that computes every metric."""
        return cls().preset("tiny")

    @classmethod
    def paper(cls: type[R]) -> R:
        """The recipe of the preset "paper": sizes and schedule as published."""
        return cls().preset("paper")

    @property
    def source(self) -> str | None:
        """The data that --check reads; None: the task's own."""
        return self.data

    def check_options(self) -> dict[str, Any]:
        """The options that the task's `data.check` takes beside folder and layout, by name."""
        return {}

    def annotations(self) -> dict[str, str]:
        """The types of all options, by which text is parsed."""
        return {**self.other_options(), **{field.name: str(field.type) for field in fields(self)}}

    def other_options(self) -> dict[str, str]:
        """Annotations of options that `changed` takes beside the recipe's own, by name."""
        return {}

    def with_others(self: R, options: Mapping[str, Any]) -> R:
        """This recipe with options that are not its own fields. A task whose recipe takes some overrides this."""
        name = next(iter(options))
        known = nearest_first(name, (field.name for field in fields(self)))
        allowed = ", ".join(known[:8]) + " …"
        raise OptionError(name, "an unknown option", allowed, f"help({type(self).__qualname__}) lists all.")


def check_milestones(milestones: Any) -> None:
    """Raise OptionError unless these are shares of a training."""
    shares = milestones if isinstance(milestones, (tuple, list)) else (None,)
    if not all(type(share) in (int, float) and 0 < share < 1 for share in shares):
        raise OptionError("milestones", repr(milestones), "shares between 0 and 1", "Pass (0.33, 0.67), say.")


def load_recipe(path: str | Path) -> TaskRecipe:
    """The recipe in a file, or one of polymix's own by its name, such as "text".

    A Python file is run, and sets `recipe`. A JSON or YAML file has a `task` and that task's options; it is not run.
    """
    path = built_domains().get(check_domain(str(path)), Path(path))
    if not path.is_file():
        allowed = f"a Python, JSON or YAML file, or one of {', '.join(built_domains())}"
        raise OptionError("recipe", str(path), allowed, "Try polymix train text.")
    if path.suffix.lower() in FORMATS:
        return _read(path)
    recipe = getattr(load_python(path, "recipe"), "recipe", None)
    if not isinstance(recipe, TaskRecipe):
        got = f"{path}, in which it is {type(recipe).__name__}"
        raise OptionError(
            "recipe", got, "a file that sets recipe, such as recipe = TextRecipe()", "See CONTRIBUTING.md."
        )
    return recipe


def own_tasks() -> dict[str, str]:
    """The modules with the recipes of polymix's own tasks, by the task's name."""
    files = sorted(Path(__file__).parent.glob("*/recipe.py"))
    return {file.parent.name: f"{__package__}.{file.parent.name}.recipe" for file in files}


def recipe_of(task: str, options: Mapping[str, Any], source: str | Path) -> TaskRecipe:
    """The recipe of one of polymix's own tasks with options as JSON has them; `source` is for the error."""
    modules, task = own_tasks(), check_domain(task)
    if task not in modules:
        got = f"task {task!r} in {source}"
        raise OptionError("recipe", got, f"task: {', '.join(modules)}", "For a task of your own, use a Python file.")
    module = import_module(modules[task])
    classes = (kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, TaskRecipe))
    recipe = next(kind for kind in classes if kind.__module__ == module.__name__)()
    annotations = recipe.annotations()
    return recipe.with_options({name: _plain(value, annotations.get(name, "")) for name, value in options.items()})


def _plain(value: Any, annotation: str) -> Any:
    """A value of a file as --set would give it: text is parsed, so that YAML's 1e-3 is a number; a list is a tuple."""
    if isinstance(value, str):
        return parse_value(value, annotation)
    return tuple(value) if isinstance(value, list) else value


def _read(path: Path) -> TaskRecipe:
    """The recipe in a JSON or YAML file."""
    form = "JSON" if path.suffix.lower() == ".json" else "YAML"
    allowed = f"{form} such as " + ('{"task": "text", "steps": 200}' if form == "JSON" else '"task: text"')
    if path.stat().st_size > LARGEST:
        got = f"{path}, of {path.stat().st_size:,} bytes"
        raise OptionError("recipe", got, f"at most {LARGEST:,} bytes", "Give a recipe, not its data.")
    try:
        text = path.read_text("utf-8")
        content = json.loads(text, object_pairs_hook=_once) if form == "JSON" else _yaml(text)
        if not isinstance(content, dict) or not all(isinstance(name, str) for name in content):
            raise ValueError(f"{type(content).__name__} instead of options by name")
        json.dumps(content)  # YAML has dates, sets and bytes too
    except (OSError, ValueError, TypeError, RecursionError) as error:
        reason = "too deep" if isinstance(error, RecursionError) else " ".join(str(error).split())
        raise OptionError("recipe", f"{path}, which cannot be read ({reason})", allowed, "") from error
    options = {name: value for name, value in content.items() if name != "task"}
    return recipe_of(str(content.get("task")), options, path)


def _once(pairs: Sequence[tuple[Any, Any]]) -> dict[Any, Any]:
    """A dict of pairs. ValueError for a name that comes twice, of which JSON and YAML would drop the first."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"{next(name for name in names if names.count(name) > 1)} twice")
    return found


def _yaml(text: str) -> Any:
    try:
        import yaml
    except ImportError as error:
        raise MissingExtraError("pyyaml", str(error), "pip install 'polymix[train]'", "YAML needs it.") from error

    class Loader(yaml.SafeLoader):
        """Plain values, each name once, and no aliases, by which a short file becomes a huge one."""

        def compose_node(self, parent: Any, index: Any) -> Any:
            if self.check_event(yaml.AliasEvent):
                raise ValueError("aliases are not supported")
            return super().compose_node(parent, index)

        def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
            return _once([(self.construct_object(key, True), self.construct_object(value, True))
                          for key, value in node.value])  # fmt: skip

    try:
        return yaml.load(text, Loader)
    except yaml.YAMLError as error:
        raise ValueError(str(error)) from error
