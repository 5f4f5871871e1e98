"""The options of a training, each written once: type, range and meaning give the check, the flag, the help, the table.

A recipe is a frozen pydantic model. An option that several domains share is an alias such as `Steps`, so that a domain
that changes a default alone writes `steps: Steps = 400`. Nothing here needs PyTorch, so that help and mistakes in
options are quick.
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Mapping, Sequence
from os import PathLike, fsencode, fspath
from typing import Annotated, Any, ClassVar, Literal, TypeVar, get_args

from polymix import errors
from polymix.errors import IdleOptionError, OptionError, UnknownOptionError
from polymix.extras import needs
from polymix.options import parse_value
from polymix.train.option_effects import Beside, find_idle
from polymix.train.option_words import default_of, expected, shape_of, shown

with needs("train", "Options are checked with it."):
    from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

ATTENTION, CONTROL = "softmax", "linear_floor"
KEEP = "keep"  # as mixer: the host keeps its own attention
R = TypeVar("R", bound="Recipe")


def _path(value: Any) -> Any:
    value = fspath(value) if isinstance(value, PathLike) else value
    if isinstance(value, str):
        fsencode(value)  # raises a ValueError for text that no file can be named
    return value


Place = Annotated[str, BeforeValidator(_path), Field(min_length=1)]
Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0)]
NotNegative = Annotated[float, Field(ge=0)]
Share = Annotated[float, Field(ge=0, lt=1)]
Fraction = Annotated[float, Field(ge=0, le=1)]

BatchSize = Annotated[Count, Field(description="samples in a step, over all processes")]
Steps = Annotated[Count, Field(description="steps of the training")]
LearningRate = Annotated[Positive, Field(description="the highest learning rate")]
Warmup = Annotated[Share, Field(description="share of the steps in which the learning rate rises")]
Final = Annotated[Fraction, Field(description="learning rate of the last step, as a share of the highest")]
WeightDecay = Annotated[NotNegative, Field(description="decay of the weights, of those that `decay` names")]
Decay = Annotated[
    Literal["matrices", "all_but_norms", "all"],
    Field(description="what decays: all but vectors and what a mixer exempts; all but the weights of norms; or all"),
]
Betas = Annotated[tuple[Share, Share], Field(description="of AdamW")]
Clip = Annotated[Positive | None, Field(description="bound of the gradient, by `clip_by`; None: it is not clipped")]
Ema = Annotated[Share, Field(description="decay of averaged weights, which are then evaluated and saved; 0: none")]
EmaRise = Annotated[
    Literal["steps", "half_steps", "exponential", "none"],
    Field(
        description="how the decay d rises to ema after n steps: to min(ema, (1 + n) / (10 + n)), or so with n / 2,"
        " or as ema · (1 − e^(−n / 2000)); none: it is ema from the start"
    ),
]
CosineFrom = Annotated[
    Literal["warmup", "start"],
    Field(description="where the cosine begins: after the warm-up, or at the first step, under the warm-up"),
]
Keep = Annotated[
    Literal["last", "best"],
    Field(description="which weights are saved: the last, or the best on the validation part, by the first metric"),
]
HostInit = Annotated[
    Literal["own", "published"],
    Field(description="how the host's linear layers, with those of attention, start; other mixers start their own way"),
]
Mixer = Annotated[str, Field(min_length=1, description="mixer of every block, such as padre:degree=3")]
Every = Annotated[Count, Field(description="in steps")]
EvaluateEvery = Annotated[
    Count | None,
    Field(
        description="steps between two evaluations; a run shorter than that has as many as one of the default steps;"
        " None: one, at the end"
    ),
]
CheckpointEvery = Annotated[Count, Field(description="steps between two checkpoints")]
LogEvery = Annotated[Count, Field(description="steps between two rows of metrics.jsonl; at most a tenth of them all")]
Layers = Annotated[
    str | None, Field(description="blocks that get the mixer, such as 1:1; the others keep attention (see convert)")
]


class Recipe(BaseModel):
    """The options that all domains share. A domain's own recipe is a subclass that adds to them."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, validate_default=True)

    # Where the domain's Task stands, "package.module:Class"; it is loaded when something is computed.
    task: ClassVar[str] = ""
    # Options of the presets by name: "tiny", a smoke test, and "paper", the settings of the paper.
    presets: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    takes_plan: ClassVar[bool] = False  # whether the task's `build` asks `mixers_for`
    without_mixer: ClassVar[str | None] = None  # the value of `mixer` for a host of its own without a block
    after_training: ClassVar[tuple[str, ...]] = ()  # options that a trained model may be used with other values of
    in_pictures: ClassVar[tuple[str, ...]] = ()  # such options that change pictures and answers, and no measurement
    sources: ClassVar[tuple[str, ...]] = ("data",)  # options of which each names data of one's own
    names: ClassVar[tuple[str, ...]] = ()  # of data that are installed, which stand for a path
    # Options that fit the data for which they were set: with other data they are as by default, unless set anew.
    fits_source: ClassVar[tuple[str, ...]] = ("layout",)
    of_default: ClassVar[tuple[str, ...]] = ()  # options that choose the default data: refused with data of one's own
    reading: ClassVar[tuple[str, ...]] = ()  # options of how data are read, which hold for other data too
    # Refused where they are set beside other values, as they would be ignored.
    only_beside: ClassVar[tuple[Beside, ...]] = (
        ("clip", (), ("clip_by",)), ("ema", (), ("ema_rise", "ema_buffers")), ("warmup", (), ("cosine_from",)),
    )  # fmt: skip
    times_lengths: ClassVar[bool] = False  # whether `polymix compare` also times mixers over numbers of tokens, unasked
    # The option with the length of a sequence, for models that read sequences token after token.
    sequence_option: ClassVar[str | None] = None
    others: ClassVar[str | None] = None  # the option, a dict, that takes options which are not the recipe's own
    # Options that a resumed run may change, because they do not change the result, or because the data decides it.
    changeable: ClassVar[tuple[str, ...]] = (
        "data", "device", "strategy", "sequence_parallel", "accumulate", "workers", "log_every", "checkpoint_every",
        "logger", "control",
    )  # fmt: skip

    data: Place | None = Field(None, description="file or folder of the data; None: the default data")
    layout: str | None = Field(None, description="how the files of data are arranged; None: recognised by its files")
    mixer: Mixer = "pom"
    plan: Layers = None
    init: Place | None = Field(None, description="folder of a trained or converted model to start from; None: fresh")
    control: bool | None = Field(
        None,
        description="also train linear_floor, which mixes nothing; None: on the default data, unless the host keeps its"
        " own attention",
    )
    batch_size: BatchSize = 32
    accumulate: Count = Field(1, description="parts of a batch that a process computes one after another")
    steps: Steps = 1000
    epochs: Positive | None = Field(None, description="passes over the training data, instead of steps")
    learning_rate: LearningRate = 1e-3
    warmup: Warmup = 0.1
    final: Final = 0.1
    cosine_from: CosineFrom = "warmup"
    weight_decay: WeightDecay = 0.05
    decay: Decay = "matrices"
    betas: Betas = (0.9, 0.95)
    clip: Clip = 1.0
    clip_by: Literal["norm", "value"] = Field(
        "norm", description="clip the norm of the whole gradient, or each number in it"
    )
    ema: Ema = 0.0
    ema_rise: EmaRise = "steps"
    ema_buffers: bool = Field(False, description="average the statistics of batch norms too; False: take the last")
    keep: Keep = "last"
    precision: Literal["float32", "bfloat16", "float16"] = Field("float32", description="type of the activations")
    checkpointing: bool = Field(False, description="compute blocks again in the backward pass, to save memory")
    seed: int = Field(0, ge=0, le=2**63 - 1, description="of synthetic data, weights, the order of samples and dropout")
    device: str = Field("cpu", pattern=r"^(cpu|cuda)(:\d+)?$|^mps$", description="cpu, cuda, cuda:1 or mps")
    strategy: Literal["auto", "ddp", "fsdp"] = Field("auto", description="of several processes under torchrun")
    sequence_parallel: Count = Field(1, description="processes that share each sequence; the others share the batch")
    workers: int = Field(0, ge=0, le=1024, description="processes that load data")
    log_every: LogEvery = 10
    evaluate_every: EvaluateEvery = 100
    checkpoint_every: CheckpointEvery = 100
    logger: Literal["csv", "tensorboard", "wandb"] | None = Field(None, description="also gets every row of metrics")

    @model_validator(mode="after")
    def _shared_options_fit(self) -> Recipe:
        for name in type(self).model_fields:
            values = getattr(self, name)
            for value in values if isinstance(values, tuple) else (values,):
                if isinstance(value, int) and value > errors.MAX_TOKENS and name != "seed":
                    raise wrong(name, value, f"an integer of at most {errors.MAX_TOKENS}", "Pass a smaller one.")
        idle = find_idle(self, self.only_beside)
        if idle is not None:
            raise _WrongOptionError(idle)
        if self.batch_size % self.accumulate:
            raise wrong("accumulate", self.accumulate, f"a divisor of batch_size={self.batch_size}", "Change one.")
        if self.plan is not None and not self.takes_plan:
            raise wrong("plan", repr(self.plan), "None: this domain has no plans", "Choose a mixer instead.")
        return self

    def __init__(self, **options: Any) -> None:
        """Raises OptionError: an option is unknown or out of range, or does not fit another one."""
        name = next((name for name in options if name not in type(self).model_fields), None)
        if name is not None:
            raise unknown(type(self), name)
        for name, value in options.items():
            for part in value.values() if isinstance(value, Mapping) else (value,):
                errors.check_numbers(name, part)
        try:
            super().__init__(**{name: _plain(value, type(self), name) for name, value in options.items()})
        except ValidationError as error:
            raise _in_words(type(self), error, options) from None

    @classmethod
    def make(cls: type[R], options: Mapping[str, Any]) -> R:
        """A recipe with options by name; those that are not its own go to the option `others`, where there is one."""
        own = {name: value for name, value in options.items() if name in cls.model_fields}
        rest = {name: value for name, value in options.items() if name not in own}
        if rest and cls.others is not None:
            types = cls.types_of_others()
            rest = {name: parse_value(value, types.get(name, "")) if isinstance(value, str) else value
                    for name, value in rest.items()}  # fmt: skip
            own[cls.others] = {**own.get(cls.others, {}), **rest}
            rest = {}
        return cls(**own, **rest)

    @classmethod
    def types_of_others(cls) -> dict[str, str]:
        """The types of options that go to `others`, as text, by which words are parsed."""
        return {}

    def changed(self: R, **options: Any) -> R:
        """This recipe with other options, all checked again; with `steps` in place of a recipe's epochs.

        An option that has no effect beside those given is then as by default.
        """
        if "steps" in options and "epochs" not in options:
            options["epochs"] = None
        before = {name: getattr(self, name) for name in type(self).model_fields}
        return type(self).without_idle({**before, **options}, keep=options)

    @classmethod
    def without_idle(cls: type[R], options: Mapping[str, Any], keep: Collection[str] = ()) -> R:
        """`make` with options of which those without an effect are as by default, unless `keep` names them."""
        while True:
            try:
                return cls.make(options)
            except IdleOptionError as error:
                if error.argument in keep:
                    raise
                options = {**options, error.argument: default_of(cls, error.argument)}

    def preset(self: R, name: str) -> R:
        """This recipe with the options of a preset. Raises OptionError for a name that the domain does not have."""
        if name not in self.presets:
            cure = "Choose one of these." if self.presets else "Leave it out."
            raise OptionError("preset", repr(name), ", ".join(self.presets) or "no preset for this domain", cure)
        return self.changed(**self.presets[name])

    @classmethod
    def for_comparison(cls, data: str | None, options: Mapping[str, Any], quick: bool) -> dict[str, Any]:
        """Options with which `polymix compare` trains where neither a preset nor its user says other.

        Args:
            data: as --data. options: the user's. quick: for a first look.
        """
        return {} if data is None else {"data": data}

    @classmethod
    def tiny(cls: type[R]) -> R:
        """The preset "tiny": the smallest run that computes every metric."""
        return cls().preset("tiny")

    @classmethod
    def paper(cls: type[R]) -> R:
        """The preset "paper": sizes and schedule as published."""
        return cls().preset("paper")

    def to_dict(self) -> dict[str, Any]:
        """The options as JSON has them."""
        return self.model_dump(mode="json")

    def decisive(self) -> dict[str, Any]:
        """The options that a resumed run must not change."""
        return {k: v for k, v in self.to_dict().items() if k not in (*self.changeable, *self.in_pictures)}

    def after(self: R, options: Mapping[str, Any]) -> R:
        """This recipe as a trained model is used with other options, perhaps on other data. Its steps stay.

        With another source, what named the training's data or fitted them alone is as by default, unless it is set.
        """
        if any(options.get(name) is not None for name in self.sources):
            names = (*self.sources, *self.fits_source, *self.of_default)
            defaults = {name: default_of(type(self), name) for name in names}
            options = {**defaults, **options}
        return self.changed(**{"steps": self.steps, "epochs": self.epochs, **options})

    @model_validator(mode="after")
    def _the_mlp_has_a_unit(self) -> Recipe:
        """Of recipes that have `mlp_ratio` and `dim`."""
        ratio, dim = getattr(self, "mlp_ratio", None), getattr(self, "dim", None)
        if ratio is not None and dim is not None and ratio * dim < 1:
            cure = f"For example, {type(self).model_fields['mlp_ratio'].default:g}."
            raise wrong("mlp_ratio", ratio, "a number that leaves a hidden unit", cure)
        return self

    def block_names(self) -> Sequence[str]:
        """The names of the blocks, for plans: `depth` of them, where a recipe does not say otherwise."""
        return [f"blocks.{place}" for place in range(getattr(self, "depth", 0))]

    @property
    def own_task(self) -> str:
        """Where this recipe's Task stands: `task`. A domain whose options choose between several overrides it."""
        return self.task

    @property
    def steps_between_rows(self) -> int:
        """`log_every`, or a tenth of the steps in a run so short that it would have fewer than ten rows."""
        return min(self.log_every, max(1, self.steps // 10))

    @property
    def steps_between_evaluations(self) -> int:
        """`evaluate_every`, or in a run that is shorter than that the same share of its steps as by default."""
        steps, every = (type(self).model_fields[name].default for name in ("steps", "evaluate_every"))
        if self.evaluate_every is None or every is None:
            return self.steps
        return self.evaluate_every if self.evaluate_every <= self.steps else math.ceil(self.steps * every / steps)

    @property
    def part_size(self) -> int:
        """Samples that are computed at once in one process."""
        return self.batch_size // self.accumulate

    @property
    def source(self) -> str | None:
        """The data of one's own, which --check reads; None: the domain's default data."""
        return next((getattr(self, name) for name in self.sources if getattr(self, name) is not None), None)

    @property
    def mixer_name(self) -> str:
        """The mixer as results name it, with the plan where there is one."""
        return f"{self.mixer} ({self.plan})" if self.plan else self.mixer

    @property
    def chooses_mixer(self) -> bool:
        """Whether the recipe decides the model's mixers; False: the host keeps its own."""
        return self.mixer != KEEP

    @property
    def wants_control(self) -> bool:
        """Whether to train `linear_floor` too."""
        asked = self.source is None and self.chooses_mixer if self.control is None else self.control
        is_control = all(re.fullmatch(f"{CONTROL}(:[^ ]*)?", part) for part in self.mixer_name.split(","))
        return asked and not is_control  # " " begins a plan

    def for_control(self: R, **options: Any) -> R:
        """This recipe with `linear_floor` in every block, also where a plan leaves attention, with fresh weights."""
        return self.changed(mixer=CONTROL, control=False, plan=None, init=None, **options)

    def for_data(self: R, epochs_per_step: float) -> R:
        """This recipe with the steps that its `epochs` take; without epochs, as it is.

        Raises OptionError for epochs_per_step=0, where every sample is new.
        """
        if self.epochs is None:
            return self
        if not epochs_per_step:
            raise OptionError("epochs", self.epochs, "None: every sample of this domain is new", "Pass steps instead.")
        most = errors.MAX_TOKENS * epochs_per_step
        if self.epochs > most:
            raise OptionError("epochs", f"{self.epochs:g}", f"at most {most:g} with these data", "Pass fewer.")
        steps = max(1, math.ceil(round(self.epochs / epochs_per_step, 6)))
        return self.changed(steps=steps, epochs=self.epochs)

    def mixers_for(self, layers: Sequence[str], match: int | None = None) -> dict[str, Any]:
        """The config of each layer's mixer: `mixer` in all of them, or where `plan` says; attention elsewhere.

        Args:
            match: give the mixer as many parameters as attention of so many channels; None: its own width.
        Raises:
            OptionError or UnknownNameError: the mixer or the plan is wrong, or the mixer cannot be matched.
        """
        from polymix.convert.matching import matched_to_attention  # these need PyTorch
        from polymix.convert.plan import parse_plan, resolve
        from polymix.mixers.spec import parse_mixer

        mixer = parse_mixer(self.mixer)[1]
        if match is not None:
            mixer = matched_to_attention(mixer, match)
        if self.plan is None:
            return dict.fromkeys(layers, mixer)
        attention = parse_mixer(ATTENTION)[1]
        chosen = resolve(parse_plan(self.plan), layers, mixer)
        return {name: attention if config is None else config for name, config in chosen.items()}


class _WrongOptionError(ValueError):
    """An OptionError on its way through pydantic, which lets no other errors pass with what they say."""

    def __init__(self, error: OptionError) -> None:
        super().__init__(str(error))
        self.error = error


def wrong(name: str, got: Any, allowed: str, cure: str = "", kind: type[OptionError] = OptionError) -> ValueError:
    """What a validator raises about options that do not fit together; whoever makes the recipe gets the OptionError."""
    return _WrongOptionError(kind(name, got, allowed, cure))


def unknown(recipe: type[Recipe], name: str) -> OptionError:
    """The error for an option that a recipe does not have, with the nearest names first."""
    near = difflib.get_close_matches(name, recipe.model_fields, 3)
    allowed = ", ".join(near or list(recipe.model_fields)[:8]) + (" …" if not near else "")
    return UnknownOptionError(name, allowed, "The command's --help lists all options.")


def _plain(value: Any, recipe: type[Recipe], name: str) -> Any:
    """A value of the command line or a file: text becomes None or a list where the type allows it."""
    annotation = str(recipe.model_fields[name].annotation)
    parts = value if isinstance(value, (tuple, list)) else (value,)
    if "bool" not in annotation and "Any" not in annotation and any(isinstance(part, bool) for part in parts):
        raise OptionError(name, errors.shown(value), expected(shape_of(recipe, name)), "True and False are no numbers.")
    if "bool" in annotation and any(type(part) in (int, float) for part in parts):
        raise OptionError(name, errors.shown(value), expected(shape_of(recipe, name)), "Numbers are neither.")
    if isinstance(value, str):
        if value.lower() == "none" and ("None" in annotation or "Optional" in annotation):
            return None
        if "dict" in annotation or "Mapping" in annotation:
            return value
        if annotation.startswith("typing.Literal["):  # of numbers
            choices = get_args(recipe.model_fields[name].annotation)
            return next((choice for choice in choices if str(choice) == value), value)
        if "tuple" in annotation:
            if "str" in annotation:
                return value.split(",")  # a space may be meant
            text = value if "Literal" in annotation else value.replace("x", ",").replace("/", ",")
            return [part.strip() for part in text.strip("()[] ").split(",") if part.strip()]
    return value


def _in_words(recipe: type[Recipe], error: ValidationError, options: Mapping[str, Any]) -> OptionError:
    """The first thing that is wrong with options, as an OptionError."""
    first = error.errors(include_url=False)[0]
    cause = first.get("ctx", {}).get("error")
    if isinstance(cause, _WrongOptionError):
        return cause.error
    name = str(first["loc"][0])
    shape = shape_of(recipe, name)
    default = default_of(recipe, name)
    cure = "" if name not in options or default in (None, (), {}) else f"For example, pass {name}={shown(default)}."
    return OptionError(name, errors.shown(options.get(name, first["input"])), expected(shape), cure)


def table(recipe: type[Recipe]) -> list[tuple[str, str, str, str]]:
    """(option, type and range, default, meaning) of every option: for the flags, --help and the docs.

    The options of the domain come first, then those that all domains share.
    """
    shapes = recipe.model_json_schema()["properties"]
    names = sorted(recipe.model_fields, key=lambda name: name in Recipe.model_fields)
    return [
        (name, expected(shapes[name]), shown(default_of(recipe, name)), shapes[name].get("description", ""))
        for name in names
    ]
