"""Plans with trained mixers: what `polymix search` keeps, and what `polymix.convert` then starts from."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

import torch
from torch import Tensor, nn

from polymix.convert.plan import KEEP, Plan, config_of
from polymix.convert.report import ConversionReport
from polymix.convert.weight_files import load_safetensors
from polymix.errors import OptionError, ResultsError, one_line
from polymix.files import is_file, regular, sha256, write_whole
from polymix.mixers.spec import mixer_config
from polymix.results import read_results

PLAN, PARTS = "plan.json", "parts.safetensors"
SEARCH_AGAIN = "Search again, or write the plan out: --plan LAYER=MIXER,…"


class PlanContent(TypedDict):
    """What plan.json holds."""

    schema: Literal["polymix.plan/1"]
    model: str
    plan: dict[str, Any]
    parts: str | None
    checksum: str | None


@dataclass(frozen=True)
class TrainedPlan:
    """A mixer for each layer, and the weights that its adapter has learnt.

    Args:
        mixers: by layer; None: its attention is kept.
        model: the fingerprint of the model that the plan is for.
        parts: state dicts of adapters by layer; empty: the mixers are untrained.
    """

    mixers: Plan
    model: str
    parts: dict[str, dict[str, Tensor]] = field(default_factory=dict)

    def plan(self) -> dict[str, Any]:
        """The plan as `polymix.convert` takes it by names."""
        return {name: KEEP if config is None else config for name, config in self.mixers.items()}

    def check(self, model: nn.Module) -> None:
        """Raise OptionError unless the parts were trained on this model."""
        if self.parts and fingerprint(model) != self.model:
            got = f"mixers that were trained for another model than this {type(model).__name__}"
            allowed = "a plan that was searched for this model, with the same weights and image size"
            raise OptionError("plan", got, allowed, SEARCH_AGAIN)

    def fill(self, report: ConversionReport) -> None:
        """Give the mixers of a conversion the trained weights. Raises OptionError, the conversion undone."""
        for name, state in self.parts.items():
            own = report.adapters[name].state_dict()
            if own.keys() != state.keys() or any(own[key].shape != value.shape for key, value in state.items()):
                report.undo()
                got = f"weights of {name} that its mixer does not have"
                raise OptionError("plan", got, "a conversion with the options of the search", SEARCH_AGAIN)
        for name, state in self.parts.items():
            report.adapters[name].load_state_dict(state)

    def save(self, folder: Path) -> Path:
        """Write plan.json and, with parts, parts.safetensors beside it; returns the path of the plan."""
        checksum = None
        if self.parts:
            tensors = {f"{name}|{key}": value.detach().cpu().contiguous().clone()
                       for name, state in self.parts.items() for key, value in state.items()}  # fmt: skip
            write_whole(folder / PARTS, partial(load_safetensors().torch.save_file, tensors))
            checksum = sha256(folder / PARTS)
        mixers = {name: KEEP if config is None else config.to_dict() for name, config in self.mixers.items()}
        content = {"schema": "polymix.plan/1", "model": self.model, "plan": mixers,
                   "parts": PARTS if self.parts else None, "checksum": checksum}  # fmt: skip
        write_whole(folder / PLAN, json.dumps(content, indent=1, allow_nan=False) + "\n")
        return folder / PLAN


def trained_plan(plan: Any) -> TrainedPlan | None:
    """The trained plan that is meant: itself, the result of `polymix.search`, or the path of its plan.json."""
    if is_plan_file(plan):
        return read_plan(plan)
    trained = getattr(plan, "trained", plan)
    return trained if isinstance(trained, TrainedPlan) else None


def is_plan_file(text: Any) -> bool:
    """Whether a plan is the name of a file; no mixer or pattern ends so."""
    return isinstance(text, Path) or (isinstance(text, str) and text.endswith(".json"))


def read_plan(path: str | Path, argument: str = "plan") -> TrainedPlan:
    """Read plan.json and the parts that it names.

    Raises:
        OptionError: there is no such file. ResultsError: it or the parts are damaged, or not of one search.
    """
    path = Path(path)
    if not is_file(path):
        allowed = "a mixer, a pattern, or a plan.json that polymix search wrote"
        raise OptionError(argument, f"{path}, which does not exist", allowed, "Check the path.")
    content = read_results(path, PlanContent, "polymix search")
    mixers = {
        name: None if mixer == KEEP else mixer_config(mixer) if isinstance(mixer, dict) else config_of(mixer, argument)
        for name, mixer in content["plan"].items()
    }
    parts: dict[str, dict[str, Tensor]] = {}
    if content["parts"] is not None:
        file = path.parent / Path(content["parts"]).name
        safetensors = load_safetensors()
        try:
            if sha256(file) != content["checksum"]:
                raise ResultsError(str(file), "other weights than the plan's", f"the file beside {path}", SEARCH_AGAIN)
            state = safetensors.torch.load_file(regular(file))
        except (OSError, ValueError, safetensors.SafetensorError) as error:
            if isinstance(error, ResultsError):
                raise
            got = f"weights that cannot be read ({one_line(error)[:200]})"
            raise ResultsError(str(file), got, f"the file that {path} names", SEARCH_AGAIN) from error
        for key, value in state.items():
            name, _, own = key.partition("|")
            parts.setdefault(name, {})[own] = value
        if not all(mixers.get(name) for name in parts):
            raise ResultsError(str(file), "weights of layers without a mixer", "the plan's own", SEARCH_AGAIN)
    return TrainedPlan(mixers, content["model"], parts)


def fingerprint(model: nn.Module) -> str:
    """A checksum of all weights and buffers of a model, with their names and shapes."""
    digest = hashlib.sha256()
    for name, value in sorted(model.state_dict().items()):
        if isinstance(value, Tensor):
            digest.update(f"{name}{tuple(value.shape)}{value.dtype}".encode())
            digest.update(bytes_of(value))
    return digest.hexdigest()


def bytes_of(value: Tensor) -> bytes:
    """The numbers of a tensor of any type, as bytes."""
    data: bytes = value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
    return data
