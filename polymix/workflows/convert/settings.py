"""What `polymix convert` is asked to do."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from polymix._io import check_device
from polymix.convert.plan import KEEP, config_of, pattern_of, resolve
from polymix.errors import OptionError, check_choice, check_int

RECOMMEND = "recommend"
_MEASURING = ("seconds", "lengths", "trust")  # and reading: what comes out of the conversion does not depend on them


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Everything that a run depends on; it is resumed with the same alone, as far as that decides the model. None: as
    the model has it."""

    model: str
    plan: str = "padre"
    mixer: str | None = None
    weights: str | None = None
    data: str | None = None
    image_size: int | None = None
    tokens: int | None = None
    batch: int | None = None
    distill_epochs: int = 0
    imitate_epochs: int | None = None
    init: str = "inherit"
    windows: str = "keep"
    keep_host: bool = False
    device: str = "cpu"
    seed: int = 0
    seconds: float = 20.0
    lengths: tuple[float, ...] = (0.25, 1, 4, 16)
    trust: bool = False

    def check(self) -> str | dict[str, str]:
        """The plan, once everything that needs no model has been found sound."""
        for name, low in (("image_size", 1), ("tokens", 1), ("batch", 1), ("imitate_epochs", 0)):
            if getattr(self, name) is not None:
                check_int("--" + name.replace("_", "-"), getattr(self, name), low)
        check_int("--distill-epochs", self.distill_epochs, 0)
        check_int("--seed", self.seed, 0)
        check_choice("--init", self.init, ("inherit", "fresh"))
        check_choice("--windows", self.windows, ("keep", "merge"))
        check_choice("--keep-host", self.keep_host, (True, False))
        check_device(self.device, "--device")
        if not self.seconds > 0 or not self.lengths or min(self.lengths) <= 0:
            raise OptionError("--seconds, --lengths", (self.seconds, self.lengths), "numbers above 0", "")
        if self.data is None and (self.distill_epochs or self.imitate_epochs):
            raise OptionError("--distill-epochs, --imitate-epochs", "epochs without data", "0", "Pass --data DIR.")
        if self.mixer is not None and not pattern_of(self.plan):
            got = f"{self.mixer} beside --plan {self.plan}, which says itself what goes where"
            raise OptionError("--mixer", got, "a plan such as 1:1, which it fills", "Leave one of the two out.")
        plan = parse_plan(self.plan)
        if isinstance(plan, dict):
            for mixer in plan.values():
                _ = mixer == KEEP or config_of(mixer, "--plan")
        elif plan != RECOMMEND:
            resolve(plan, [str(place) for place in range(1000)], self.filling)
        return plan

    @property
    def filling(self) -> str:
        """What a pattern puts in."""
        return self.mixer or "padre"

    @property
    def epochs(self) -> tuple[int, int]:
        """Of imitation, and of fine-tuning."""
        imitate = int(self.distill_epochs > 0) if self.imitate_epochs is None else self.imitate_epochs
        return imitate, self.distill_epochs

    def to_dict(self) -> dict[str, Any]:
        values = {name: value for name, value in asdict(self).items() if name not in _MEASURING}
        for name in ("weights", "data"):
            path = None if values[name] is None else Path(values[name])
            values[name] = str(path.resolve()) if path is not None and path.exists() else values[name]
        return values


def parse_plan(text: str) -> str | dict[str, str]:
    """ "padre:degree=3", "1:1" and "recommend" as they are; "blocks.*.attn=padre:degree=3,blocks.11.attn=keep" as a
    dict: a layer, or a glob, is what stands before the first =, if no colon does."""
    if "," not in text and not _layer(text):
        return text.strip()
    plan: dict[str, str] = {}
    for part in text.split(","):
        layer, mixer = _layer(part), part.partition("=")[2].strip()
        if not layer or not mixer:
            allowed = "layer=mixer, such as blocks.*.attn=padre:degree=3 or blocks.11.attn=keep"
            raise OptionError("--plan", repr(part), allowed, "Put commas between them.")
        if layer in plan:
            raise OptionError("--plan", f"{layer} twice", "each layer or glob once", "Drop one of them.")
        plan[layer] = mixer
    return plan


def _layer(part: str) -> str:
    layer, sign, _ = part.partition("=")
    return layer.strip() if sign and ":" not in layer else ""
