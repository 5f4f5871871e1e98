"""Every mixer for every layer of one model, each in an adapter of its own, outside the model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn

from polymix.convert import Adapter, ConversionReport, convert
from polymix.convert.convert import attention_layers, included
from polymix.convert.plan import KEEP
from polymix.convert.tracing import LayerCall, record_layers
from polymix.errors import CapabilityError, PolymixError
from polymix.mixers import MixerConfig
from polymix.workflows.search.knapsack import Pair

Installer = Callable[[], AbstractContextManager[nn.Module]]


class Candidates:
    """The adapters of one model, and the calls of its layers.

    Args:
        host: in evaluation mode; it is left as it is.
        mixers: by label.
        batch: of the data, to which mixers are scaled. example: an input at the shape at which layers are timed.
        seed_for: called with each label before its mixers are made.

    Attributes:
        layers: those that the example reaches and that a plan without names replaces. adapters: by layer and label.
        refused: for each label the layers that cannot have it, with the reason.
    """

    def __init__(
        self, host: nn.Module, mixers: Mapping[str, MixerConfig], batch: Any, example: Any,
        seed_for: Callable[[str], None],
    ) -> None:  # fmt: skip
        self.host, self.mixers = host, dict(mixers)
        known = attention_layers(host)
        self.calls: dict[str, LayerCall] = record_layers(host, known, example)
        self.layers = {name: known[name] for name in included(host, known) if name in self.calls}
        self.adapters: dict[Pair, Adapter] = {}
        self.refused: dict[str, dict[str, str]] = {}
        for label, config in self.mixers.items():
            seed_for(label)
            self._convert(label, config, batch)

    def _convert(self, label: str, config: MixerConfig, batch: Any) -> None:
        """All layers at once; where that is refused, one by one."""
        try:
            self._take(label, convert(self.host, dict.fromkeys(self.layers, config), input=batch))
        except PolymixError:
            for name in self.layers:
                try:
                    self._take(label, convert(self.host, {name: config}, input=batch))
                except CapabilityError as error:
                    self._refuse(label, name, str(error.got))
                except PolymixError as error:
                    self._refuse(
                        label, name, f"{error.argument.rpartition(': ')[2]} is {error.got}, not {error.allowed}"
                    )

    def _refuse(self, label: str, layer: str, why: str) -> None:
        self.refused.setdefault(label, {})[layer] = " ".join(why.split())

    def _take(self, label: str, report: ConversionReport) -> None:
        report.undo()
        self.adapters |= {(name, label): adapter.eval() for name, adapter in report.adapters.items()}

    def labels(self, layer: str) -> list[str]:
        """The mixers that a layer can have."""
        return [label for label in self.mixers if (layer, label) in self.adapters]

    def install(self, plan: Mapping[str, str]) -> Installer:
        """What puts a plan's mixers into the model for a while; layers with "keep" keep their attention."""
        return partial(self._installed, [(layer, label) for layer, label in plan.items() if label != KEEP])

    @contextmanager
    def _installed(self, pairs: Sequence[Pair]) -> Iterator[nn.Module]:
        report = self.report(pairs)
        try:
            yield report.model
        finally:
            report.undo()

    def report(self, pairs: Sequence[Pair]) -> ConversionReport:
        """A conversion with these adapters, in place."""
        return ConversionReport(self.host, {layer: self.adapters[layer, label] for layer, label in pairs}, (), ())

    def state(self, pair: Pair) -> dict[str, torch.Tensor]:
        """A copy of an adapter's weights."""
        return {name: value.detach().clone() for name, value in self.adapters[pair].state_dict().items()}
