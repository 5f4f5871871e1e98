"""What ran, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import nn

from polymix.errors import OptionError
from polymix.mixers.mixer import TokenMixer
from polymix.ops.dispatch import Choice, recording


@dataclass(frozen=True)
class Explanation:
    """One mixer in one call. `layer` is its name in the model, "" for a mixer by itself."""

    layer: str
    mixer: str
    impl: str
    why: str
    folded: tuple[str, ...] = ()

    def __str__(self) -> str:
        where = f"{self.layer} ({self.mixer})" if self.layer else self.mixer
        folded = f"; folded: {', '.join(self.folded)}" if self.folded else ""
        return f"{where}: {self.impl}; {self.why}{folded}"


class Explanations(tuple[Explanation, ...]):
    """One line a mixer when printed."""

    def __str__(self) -> str:
        return "\n".join(map(str, self))


def explain(model: nn.Module, *args: Any, **kwargs: Any) -> Explanations:
    """Run model(*args, **kwargs) and say, for every mixer in it, which implementation ran and why.

    The call is made as it stands: under torch.inference_mode() another one may run than where gradients are recorded.
    Raises OptionError where the model holds no mixer that ran, and whatever the call itself raises.

    Example: print(polymix.explain(mixer, x))
    """
    names = {part: name for name, part in model.named_modules() if isinstance(part, TokenMixer)}
    found: list[Explanation] = []
    started: list[int] = []

    with recording() as choices:

        def before(mixer: nn.Module, _: Any) -> None:
            started.append(len(choices))

        def after(mixer: nn.Module, _: Any, __: Any) -> None:
            assert isinstance(mixer, TokenMixer)
            own = choices[started.pop() :] or [Choice(mixer.name, "eager", "the only implementation")]
            found.extend(Explanation(names[mixer], *choice, mixer.folded) for choice in own)

        hooks = [hook for part in names for hook in (part.register_forward_pre_hook(before),
                                                     part.register_forward_hook(after))]  # fmt: skip
        try:
            model(*args, **kwargs)
        finally:
            for hook in hooks:
                hook.remove()
    if not found:
        raise OptionError("model", type(model).__name__, "a mixer, or a model with mixers that its forward runs", "")
    return Explanations(found)


__all__ = ["Explanation", "explain"]
