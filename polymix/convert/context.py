"""A longer context: a text model of transformers takes more tokens than it was trained with.

Learned positions get more rows, rotary angles go on or are scaled, and the limits in the config rise. All of it is set
in the model in place, is recorded, and can be taken back to the bit.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polymix.errors import CapabilityError, OptionError, PolymixError, one_line
from polymix.limits import Unfilled

EXTENSIONS = ("interpolate", "repeat", "none", "continue")  # the values of `convert(positions=)` with a context
LIMITS = ("max_position_embeddings", "max_seq_len")  # names of the limit in configs
SCALED = ("default", "linear", "yarn", "llama3", "proportional")  # types of rotary angles whose factor can be raised
MAX_RESERVED = 8  # more rows before the first position than any model has
_ORDER = ("position_ids", "token_type_ids")  # buffers of embeddings that are as long as the limit


def text_config(model: Any) -> Any:
    """The config of a model's text part; None where the model does not read token ids."""
    config = getattr(model, "config", None)
    if config is None or getattr(model, "main_input_name", None) != "input_ids":
        return None
    return _text_part(config)


def stated_limit(config: Any) -> tuple[str, int] | None:
    """The name and value of the limit in a config."""
    values = ((name, getattr(config, name, None)) for name in LIMITS)
    return next(((name, value) for name, value in values if type(value) is int and value > 0), None)


def learned_positions(model: Any) -> dict[str, int]:
    """Tables of learned positions, by name, with the rows that stand before the first position (OPT, RoBERTa)."""
    limit = stated_limit(text_config(model))
    if limit is None:
        return {}
    tables: dict[str, int] = {}
    for name, part in model.named_modules():
        last = name.rpartition(".")[2]
        if isinstance(part, nn.Embedding) and re.search("pos|wpe", last) and not re.search("rel", last):
            before = part.num_embeddings - limit[1]
            if before == 0 and part.padding_idx is not None:
                before = part.padding_idx + 1
            if 0 <= before <= MAX_RESERVED:
                tables[name] = before
    return tables


def longest(model: Any) -> int | None:
    """The most tokens that a text model takes; None where it states no limit."""
    limit = stated_limit(text_config(model))
    if limit is None:
        return None
    rows = [model.get_submodule(name).num_embeddings - before for name, before in learned_positions(model).items()]
    return min([limit[1], *rows])


@dataclass(frozen=True)
class Resized:
    """A table of positions: its name, and its rows and channels before and after."""

    name: str
    before: tuple[int, int]
    after: tuple[int, int]


class Extension:
    """What raises the limit of a model. `revert` takes it back, `apply` sets it again.

    Attributes:
        before, after: the most tokens. learned, rotary: what became of positions, one of EXTENSIONS; None: the model
            has none of that kind. tables: the tables of learned positions.
    """

    def __init__(self, before: int, after: int) -> None:
        self.before, self.after = before, after
        self.learned: str | None = None
        self.rotary: str | None = None
        self.tables: list[Resized] = []
        self._settings: list[tuple[Any, str, Any]] = []  # (module or config, attribute, the value that is not in it)

    def set(self, place: Any, attribute: str, value: Any) -> None:
        self._settings.append((place, attribute, getattr(place, attribute)))
        setattr(place, attribute, value)

    def revert(self) -> None:
        self._exchange(reversed(range(len(self._settings))))

    def apply(self) -> None:
        self._exchange(iter(range(len(self._settings))))

    def _exchange(self, order: Iterator[int]) -> None:
        for i in order:
            place, attribute, value = self._settings[i]
            self._settings[i] = place, attribute, getattr(place, attribute)
            setattr(place, attribute, value)

    def to_dict(self) -> dict[str, Any]:
        return {"before": self.before, "after": self.after, "learned": self.learned, "rotary": self.rotary}

    def __str__(self) -> str:
        """A sentence for the report."""
        ways = {
            "interpolate": "interpolated", "repeat": "repeated", "none": "set to zero and not trained",
            "continue": "left as they are, and go on",
        }  # fmt: skip
        parts = [
            f"{table.name}.weight was resized from {_size(table.before)} to {_size(table.after)}, "
            f"{ways[self.learned or 'interpolate']}"
            for table in self.tables
        ]
        if self.rotary is not None:
            scaled = f"scaled by {self.before / self.after:.3g}"
            parts.append(f"rotary angles are {scaled if self.rotary == 'interpolate' else ways[self.rotary]}")
        return f"The context is {self.after:,} tokens instead of {self.before:,}{': ' * bool(parts)}{'; '.join(parts)}."


def _size(sizes: tuple[int, int]) -> str:
    return " × ".join(f"{size:,}" for size in sizes)


@torch.no_grad()
def extended(model: nn.Module, context: int, positions: str | None, argument: str = "context") -> Extension:
    """Let a text model take `context` tokens, in place. Train it afterwards.

    Args:
        positions: "interpolate": learned positions are interpolated linearly between the first and the last, and rotary
            angles scaled, so that the model sees its old range in finer steps (Chen et al. 2023, arXiv:2306.15595).
            "repeat": learned positions start again after the last. "none": learned positions become zero, which leaves
            order to the mixers. "continue": rotary angles go on. None: "interpolate" for learned positions, "continue"
            for rotary angles.
        argument: the option's name in errors.
    Raises:
        OptionError, CapabilityError: the model's limit cannot be raised, or not so. The model is unchanged.
    """
    model = getattr(model, "_orig_mod", model)  # of torch.compile
    config, name = text_config(model), type(model).__name__
    if config is None:
        raise OptionError(
            argument, f"{context:,} for {name}", "a text model of transformers", "Images have an image size instead."
        )
    limit, most = stated_limit(config), longest(model)
    if limit is None or most is None:
        got = f"{context:,} for {name}, which states no limit: its positions are relative, or it has none"
        raise OptionError(argument, got, "no context for this model", "Leave it out: it takes any number of tokens.")
    if context <= most:
        got = f"{context:,}, and {name} takes {most:,}"
        raise OptionError(argument, got, "more tokens than the model takes", "Leave it out.")
    extension = Extension(most, context)
    try:
        _extend(extension, model, config, limit, positions, argument)
    except BaseException:
        extension.revert()
        raise
    return extension


def _extend(
    extension: Extension, model: Any, config: Any, limit: tuple[str, int], positions: str | None, argument: str
) -> None:
    name, (attribute, was) = type(model).__name__, limit
    tables, turned = learned_positions(model), _rotary(config)
    known = {
        "repeat": bool(tables),
        "none": bool(tables),
        "continue": bool(turned),
        "interpolate": bool(tables or turned),
    }
    if positions is not None and not known[positions]:
        allowed = " or ".join(repr(way) for way, fits in known.items() if fits) or "None"
        kind = "rotary angles" if turned else "learned positions" if tables else "neither"
        got = f"{positions!r} for {name}, which has {kind}"
        raise OptionError(_positions(argument), got, allowed, "Leave it out.")
    now = was + extension.after - extension.before
    changed = _dependent(model, attribute, now, argument)
    configs = {id(part.config): part.config for part in model.modules() if hasattr(part, "config")}
    configs[id(config)] = config
    for each in configs.values():
        if type(each) is type(config) and getattr(each, attribute, None) == was:
            extension.set(each, attribute, now)
    for key in tables:
        extension.learned = positions if positions in ("repeat", "none") else "interpolate"
        _resize(extension, model, key, tables[key])
    if turned:
        extension.rotary = "interpolate" if positions == "interpolate" else "continue"
        _turn(extension, model, config, was, argument)
    lost = [key for key in changed if key.rpartition(".")[0] not in tables and not _refit(extension, model, key, now)]
    if lost:
        got = f"{extension.after:,} for {name}, whose {lost[0]} depends on the number of tokens"
        raise CapabilityError(argument, got, "a model with learned positions, rotary angles or none", "Leave it out.")
    for part in model.modules():
        for own in (*LIMITS, "max_positions"):
            if vars(part).get(own) == was:
                extension.set(part, own, now)


def _dependent(model: Any, attribute: str, now: int, argument: str) -> list[str]:
    """Names of the weights and buffers whose shape depends on the limit, from a model without memory."""
    config = copy.deepcopy(model.config)
    setattr(_text_part(config), attribute, now)
    try:
        with torch.device("meta"), Unfilled():
            twin = type(model)(config)
    except PolymixError:
        raise
    except Exception as error:  # whatever a library raises for a size
        got = f"{now:,} for {type(model).__name__}, which fails with so many positions ({one_line(error)[:200]})"
        raise OptionError(argument, got, "a model that can be built with more", "") from error
    theirs = {**dict(twin.named_parameters()), **dict(twin.named_buffers())}
    ours = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    return [key for key, value in ours.items() if key in theirs and theirs[key].shape != value.shape]


def _text_part(config: Any) -> Any:
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _resize(extension: Extension, model: Any, key: str, before: int) -> None:
    """Give a table of learned positions more rows; those before the first position stay."""
    old: nn.Embedding = model.get_submodule(key)
    first, table = old.weight[:before], old.weight[before:]
    if extension.learned == "repeat":
        rows = table[torch.arange(extension.after, device=table.device) % len(table)]
    elif extension.learned == "none":
        rows = table.new_zeros(extension.after, table.shape[1])
        first = torch.zeros_like(first)
    else:
        line = table.float().t()[None]
        rows = F.interpolate(line, size=extension.after, mode="linear", align_corners=True)[0].t().to(table.dtype)
    new = copy.deepcopy(old)
    new.weight = nn.Parameter(torch.cat((first, rows)), old.weight.requires_grad and extension.learned != "none")
    new.num_embeddings = len(new.weight)
    extension.tables.append(Resized(key, tuple(old.weight.shape), tuple(new.weight.shape)))  # type: ignore[arg-type]
    _replace(extension, model, old, new)


def _replace(extension: Extension, model: nn.Module, old: nn.Module, new: nn.Module) -> None:
    """Put a module in the place of another, everywhere in the model that it occurs."""
    places = [(parent, key) for parent in model.modules() for key, child in parent._modules.items() if child is old]
    for parent, key in places:
        extension.set(parent, key, new)


def _rotary(config: Any) -> str | None:
    """The name of the config's attribute with the rotary angles; None where it has none."""
    for name in ("rope_parameters", "rope_scaling"):
        if getattr(config, name, None):
            return name
    return "rope_scaling" if getattr(config, "rope_theta", None) and hasattr(config, "rope_scaling") else None


def _turn(extension: Extension, model: Any, config: Any, was: int, argument: str) -> None:
    """Scale the rotary angles in the config, or fix what else would change with the limit; build their modules anew."""
    attribute = _rotary(config)
    assert attribute is not None
    stated = getattr(config, attribute) or {}
    nested = bool(stated) and all(isinstance(part, dict) for part in stated.values())
    ratio = extension.after / extension.before
    scale = extension.rotary == "interpolate"
    new = (
        {key: part if "sliding" in key else _scaled(part, ratio, was, scale, argument) for key, part in stated.items()}
        if nested
        else _scaled(stated, ratio, was, scale, argument)
    )
    if new != stated:
        extension.set(config, attribute, new)
    modules = [part for part in model.modules() if "otary" in type(part).__name__ and hasattr(part, "config")]
    for part in modules:
        where = next(part.buffers(), torch.empty(0)).device
        try:
            built = type(part)(part.config).to(where).train(part.training)
        except Exception as error:  # whatever a library raises
            got = f"{type(model).__name__}, whose angles cannot be built anew ({one_line(error)[:200]})"
            raise CapabilityError(argument, got, "a model of another family", "Leave it out.") from error
        _replace(extension, model, part, built)
    if scale and not modules:
        got = f"'interpolate' for {type(model).__name__}, whose angles are not computed in one place"
        raise CapabilityError(_positions(argument), got, "'continue'", "Leave it out.")


def _positions(argument: str) -> str:
    """The option beside the context, as errors name it: `positions`, or `--positions` of the command."""
    return argument.replace("context", "positions")


def _scaled(stated: dict[str, Any], ratio: float, was: int, scale: bool, argument: str) -> dict[str, Any]:
    """Rotary angles for a longer range. Types of which the factor depends on the limit keep the one that they had."""
    kind = str(stated.get("rope_type") or stated.get("type") or "default")
    original = stated.get("original_max_position_embeddings")
    fixed = {"factor": was / original} if kind in ("yarn", "longrope") and original and not stated.get("factor") else {}
    if not scale:
        return {**stated, **fixed}
    if kind not in SCALED:
        got = f"'interpolate' for rotary angles of type {kind!r}, which follow the length themselves"
        raise OptionError(_positions(argument), got, "'continue'", "Leave it out.")
    factor = {**stated, **fixed}.get("factor") or 1.0
    return {**stated, "rope_type": "linear" if kind == "default" else kind, "factor": factor * ratio}


def _refit(extension: Extension, model: Any, key: str, now: int) -> bool:
    """Make a buffer as long as the limit; whether that was done."""
    owner, _, name = key.rpartition(".")
    place = model.get_submodule(owner)
    buffer = getattr(place, name)
    if not isinstance(buffer, Tensor) or isinstance(buffer, nn.Parameter):
        return False
    if name in _ORDER:
        new = torch.arange(now, device=buffer.device).expand((*buffer.shape[:-1], now)).to(buffer.dtype)
        extension.set(place, name, new.contiguous() if name == "position_ids" else torch.zeros_like(new))
        return True
    if buffer.ndim >= 2 and buffer.shape[-1] == buffer.shape[-2] and buffer.dtype in (torch.bool, torch.uint8):
        ones = torch.ones(*buffer.shape[:-2], now, now, dtype=buffer.dtype, device=buffer.device).tril()
        small = ones[..., : buffer.shape[-2], : buffer.shape[-1]]
        if torch.equal(small, buffer):  # causal order, and no window
            extension.set(place, name, ones)
            return True
    return _rebuilt(extension, place, name)


def _rebuilt(extension: Extension, place: Any, name: str) -> bool:
    """Take a buffer, such as a table of sines, from a new module of its owner's class."""
    config = getattr(place, "config", None)
    for arguments in ((config,), (config, getattr(place, "layer_idx", None))):
        try:
            new = getattr(type(place)(*arguments), name)
        except Exception:  # another signature
            continue
        old = getattr(place, name)
        if new.dtype == old.dtype and new.ndim == old.ndim and len(new) > len(old) and torch.equal(
            new[: len(old)], old.to(new.device)
        ):  # fmt: skip
            extension.set(place, name, new.to(old.device))
            return True
    return False
