"""The options of `polymix convert`, checked before a model is loaded."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polymix.convert.context import EXTENSIONS
from polymix.convert.drops import DROPS
from polymix.convert.plan import KEEP, config_of, parse_plan, pattern_of, resolve
from polymix.convert.positions import POSITIONS
from polymix.convert.trained import TrainedPlan, is_plan_file, read_plan
from polymix.devices import check_device
from polymix.errors import OptionError, check_choice, check_int, check_number, check_seed
from polymix.limits import LONGEST, check_memory
from polymix.workflows.convert.hub import check_repo

RECOMMEND = "recommend"
NOISE = "noise"  # as --data: what a generator is distilled on
DRAWN = ("self", "random")  # as --data: what a language model is distilled on, if there is no text
MADE = (NOISE, *DRAWN)
PRECISION = {  # by the names of polymix.distill, and by Lightning's
    "float32": "float32", "bfloat16": "bfloat16", "float16": "float16", "32-true": "float32", "bf16-mixed": "bfloat16",
    "16-mixed": "float16",
}  # fmt: skip
# The converted model does not depend on these.
_WITHOUT_EFFECT = ("seconds", "lengths", "trust", "license", "base_model", "push_to_hub")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """The options of a run. None: as the model states it.

    A run is resumed with the same options, apart from those that do not change the converted model.
    """

    model: str
    plan: str = "padre"
    mixer: str | None = None
    weights: str | None = None
    classes: int | None = None
    data: str | None = None
    samples: int | None = None
    image_size: int | None = None
    tokens: int | None = None
    context: int | None = None
    batch: int | None = None
    distill_epochs: int = 0
    imitate_epochs: int | None = None
    learning_rate: float | None = None
    from_scratch: bool = False
    precision: str = "float32"
    lora: int | None = None
    progressive: int | None = None
    distill_loss: str = "logits"
    init: str = "inherit"
    windows: str = "keep"
    positions: str | None = None
    match: str | None = None
    multi_scale: bool = True
    drop: str = ""
    keep_host: bool = False
    device: str = "cpu"
    seed: int = 0
    seconds: float = 20.0
    lengths: tuple[float, ...] = (0.25, 1, 4, 16)
    trust: bool = False
    license: str | None = None
    base_model: str | None = None
    push_to_hub: str | None = None

    def check(self) -> str | dict[str, str] | TrainedPlan:
        """Check everything that needs no model; return the plan."""
        for name, low in (
            ("image_size", 1), ("tokens", 1), ("batch", 1), ("imitate_epochs", 0), ("classes", 2), ("lora", 1),
            ("progressive", 1), ("samples", 1),
        ):  # fmt: skip
            if getattr(self, name) is not None:
                check_int("--" + name.replace("_", "-"), getattr(self, name), low)
        check_int("--distill-epochs", self.distill_epochs, 0)
        if self.learning_rate is not None:
            check_number("--learning-rate", self.learning_rate, 1e-12, 1e9, "a number above 0", 1e-4)
        check_seed("--seed", self.seed)
        check_choice("--init", self.init, ("inherit", "fresh"))
        check_choice("--windows", self.windows, ("keep", "merge"))
        check_choice("--match", self.match, (None, "parameters"))
        check_choice("--positions", self.positions, (None, *(POSITIONS if self.context is None else EXTENSIONS)))
        if self.context is not None and self.tokens is not None and self.tokens > self.context:
            got = f"{self.tokens:,} with --context {self.context}"
            raise OptionError("--tokens", got, "at most the context", "Leave it out: it is the context then.")
        check_choice("--multi-scale", self.multi_scale, (True, False))
        for name in self.dropped:
            check_choice("--drop", name, tuple(DROPS))
        check_choice("--keep-host", self.keep_host, (True, False))
        check_device(self.device, "--device")
        check_number("--seconds", self.seconds, 1e-6, 1e9, "a number above 0", 20)
        if not self.lengths or not all(0 < length <= 1e6 for length in self.lengths):
            allowed = "multiples above 0 of the layers' own length"
            raise OptionError("--lengths", self.lengths, allowed, "Try --lengths 0.25,1,4.")
        size, batch = self.image_size or 1, self.batch or 1
        check_memory("--image-size, --batch", f"{batch:,} images of {size:,} × {size:,} pixels", 12 * batch * size**2)
        check_int("--tokens", self.tokens or 1, 1, LONGEST)
        check_int("--context", self.context or 1, 1, LONGEST)
        check_memory("--tokens, --batch", f"{batch:,} × {self.length or 1:,} tokens", 8 * batch * (self.length or 1))
        self._check_training()
        self._check_card()
        if self.mixer is not None and not pattern_of(self.plan):
            got = f"{self.mixer} with --plan {self.plan}, which names its mixers itself"
            raise OptionError("--mixer", got, "a pattern such as --plan 1:1", "Leave one of the two out.")
        if is_plan_file(self.plan):
            return read_plan(self.plan, "--plan")
        plan = parse_plan(self.plan)
        if isinstance(plan, dict):
            for mixer in plan.values():
                _ = mixer == KEEP or config_of(mixer, "--plan")
        elif plan != RECOMMEND:
            resolve(plan, [str(place) for place in range(1000)], self.filling)
        return plan

    def _check_training(self) -> None:
        trains = bool(self.distill_epochs or self.imitate_epochs)
        if self.data is None and trains:
            raise OptionError(
                "--distill-epochs, --imitate-epochs", "epochs without data", "0 epochs", "Pass --data DIR."
            )
        if self.samples is not None and self.data not in DRAWN:
            got = f"{self.samples} with {'no data' if self.data is None else f'--data {self.data}'}"
            raise OptionError("--samples", got, f"--data {' or '.join(DRAWN)}", "Leave it out.")
        check_choice("--precision", self.precision, PRECISION)
        check_choice("--distill-loss", self.distill_loss, ("logits", "features"))
        if PRECISION[self.precision] == "float16" and self.device.startswith("cpu"):
            got = f"{self.precision} on a CPU"
            raise OptionError("--precision", got, "float32 or bf16-mixed", "Pass --precision bf16-mixed.")
        for option, used, needed in (
            ("--precision", PRECISION[self.precision] != "float32", trains),
            ("--from-scratch", self.from_scratch, self.distill_epochs > 0),
            ("--lora", self.lora is not None, self.distill_epochs > 0),
            ("--progressive", self.progressive is not None, self.distill_epochs > 0),
            ("--distill-loss", self.aligns_features, self.distill_epochs > 0),
            ("--learning-rate", self.learning_rate is not None, self.distill_epochs > 0),
        ):  # fmt: skip
            if used and not needed:
                raise OptionError(option, "it without training", "--distill-epochs of at least 1", "Or leave it out.")
        if self.from_scratch and self.data in MADE:
            got = f"it with --data {self.data}, which only the original model labels"
            domain = "generation" if self.data == NOISE else "text"
            raise OptionError("--from-scratch", got, "a model with trained weights", f"Use polymix train {domain}.")
        if self.aligns_features and self.data in MADE:
            got = f"features with --data {self.data}, on which the model's own predictions are learnt"
            raise OptionError("--distill-loss", got, "logits", "Leave it out.")
        without = ("imitate_epochs", "lora", "progressive", "aligns_features")
        if self.from_scratch and (name := next((name for name in without if getattr(self, name)), None)):
            option = "--distill-loss" if name == "aligns_features" else "--" + name.replace("_", "-")
            got = f"{option} with --from-scratch, and an untrained model has nothing to imitate or to keep"
            raise OptionError(option, got, "one of the two", f"Leave {option} out.")

    def _check_card(self) -> None:
        for option, text, form, example in (
            ("--license", self.license, r"[a-z0-9][a-z0-9.-]*", "apache-2.0"),
            ("--base-model", self.base_model, r"[\w.-]+(/[\w.-]+)?", "timm/vit_small_patch16_224"),
        ):
            if text is not None and not re.fullmatch(form, text):
                raise OptionError(option, repr(text), f"an id of the Hugging Face Hub, such as {example}", "")
        if self.push_to_hub is not None:
            check_repo(self.push_to_hub, "--push-to-hub")

    @property
    def length(self) -> int | None:
        """The tokens of a sequence that the model is trained and measured on; None: as the model states."""
        return self.context if self.tokens is None else self.tokens

    @property
    def aligns_features(self) -> bool:
        """Whether fine-tuning aligns the last features of the model."""
        return self.distill_loss == "features"

    @property
    def dropped(self) -> tuple[str, ...]:
        """The parts of attention that may be lost."""
        return tuple(name.strip() for name in self.drop.split(",") if name.strip())

    @property
    def filling(self) -> str:
        """The mixer that a pattern inserts."""
        return self.mixer or "padre"

    @property
    def epochs(self) -> tuple[int, int]:
        """Epochs of imitation and of fine-tuning."""
        usual = int(self.distill_epochs > 0 and not self.from_scratch)
        imitate = usual if self.imitate_epochs is None else self.imitate_epochs
        return imitate, self.distill_epochs

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in _WITHOUT_EFFECT}
        for name in ("weights", "data", *(["plan"] if is_plan_file(self.plan) else [])):
            path = None if values[name] is None else Path(values[name])
            values[name] = str(path.resolve()) if path is not None and path.exists() else values[name]
        return values
