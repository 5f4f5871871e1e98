"""Which tuples of input entries interact in an output."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from polymix.errors import OptionError, ShapeError, check_int, shown
from polymix.lens.fits import SAFETY
from polymix.lens.probe import EPS, Probe, as_tokens, check_draws
from polymix.numbers import significant

Entry = tuple[int, int]  # (token, channel)
_CELLS = 4
_MAX_VALUES = 1 << 25  # largest number of values, points times outputs


class Count(NamedTuple):
    """A number of tuples that reach the output, and the number of all tuples."""

    reached: int
    possible: int

    @property
    def share(self) -> float:
        return self.reached / self.possible

    def __str__(self) -> str:
        return f"{self.reached:,} of {self.possible:,} ({100 * self.share:.3g} %)"


@dataclass(frozen=True, eq=False)
class Interactions:
    """The tuples of `order` input entries that reach one output.

    A tuple stands for a product of entries, so its order does not matter; all tuples are sorted.

    Attributes:
        order: number of entries in a tuple.
        inputs, outputs: tokens and channels of the input and of the output.
        output: (token, channel), or (token, None) for all channels of a token.
        entries: (tuples, order), each token · channels + channel.
        strength: (tuples, output tokens, output channels), the mean size of the derivative.
        reach: the same shape, whether the tuple reaches the output.
    """

    order: int
    inputs: tuple[int, int]
    outputs: tuple[int, int]
    output: tuple[int, int | None]
    entries: Tensor
    strength: Tensor
    reach: Tensor

    def of(self, token: int, channel: int | None = None) -> Interactions:
        """The same for another output."""
        check_int("token", token, 0, self.outputs[0] - 1)
        if channel is not None:
            check_int("channel", channel, 0, self.outputs[1] - 1)
        return replace(self, output=(token, channel))

    @cached_property
    def tuples(self) -> frozenset[tuple[Entry, ...]]:
        """Every product that reaches the output, as ((token, channel), …)."""
        token, channel = self.output
        reached = self.reach[:, token].any(1) if channel is None else self.reach[:, token, channel]
        channels = self.inputs[1]
        return frozenset(tuple(divmod(i, channels) for i in row) for row in self.entries[reached].tolist())

    @cached_property
    def token_tuples(self) -> frozenset[tuple[int, ...]]:
        return frozenset(tuple(token for token, _ in entries) for entries in self.tuples)

    @cached_property
    def channel_tuples(self) -> frozenset[tuple[int, ...]]:
        return frozenset(tuple(sorted(channel for _, channel in entries)) for entries in self.tuples)

    @cached_property
    def counts(self) -> dict[str, Count]:
        """How many tuples reach the output, counted in four ways.

        "tokens", "channels" and "tuples" count distinct sorted tuples. "terms" counts as the Poly-NL paper does: for
        the sorted positions of a product every assignment of channels, out of the N^order C^order entries of the
        weight tensor.
        """
        n, c = self.inputs
        k = self.order
        return {
            "tokens": Count(len(self.token_tuples), math.comb(n + k - 1, k)),
            "channels": Count(len(self.channel_tuples), math.comb(c + k - 1, k)),
            "tuples": Count(len(self.tuples), math.comb(n * c + k - 1, k)),
            "terms": Count(sum(map(_assignments, self.tuples)), (n * c) ** k),
        }

    def __str__(self) -> str:
        token, channel = self.output
        where = f"token {token}" + ("" if channel is None else f", channel {channel}")
        lines = [f"order {self.order}, {self.inputs[0]} tokens of {self.inputs[1]} channels, tuples reaching {where}:"]
        names = {"terms": "terms, as counted in the Poly-NL paper"}
        return "\n".join(lines + [f"  {names.get(name, name)}: {count}" for name, count in self.counts.items()])

    def plot(self, path: str | Path) -> Path:
        """Save a plot of output tokens against token tuples, and output channels against channel tuples."""
        from polymix.lens.plots import draw_interactions

        token, channel = self.output
        where = f"token {token}" + ("" if channel is None else f", channel {channel}")
        title = f"tuples that reach the outputs; {where}: {self.counts['tuples']}"
        return draw_interactions(Path(path), title, self.entries, self.strength * self.reach, self.inputs[1])


def _assignments(entries: tuple[Entry, ...]) -> int:
    """In how many ways a sorted product's channels can be assigned to its positions."""
    ways = 1
    for _, same in itertools.groupby(entries, key=lambda entry: entry[0]):
        channels = Counter(channel for _, channel in same)
        ways *= math.factorial(channels.total()) // math.prod(map(math.factorial, channels.values()))
    return ways


def interactions(
    module: Callable[..., Any], order: int, x: Tensor | None = None, *, shape: tuple[int, ...] | None = None,
    output: tuple[int, int | None] | None = None, draws: int = 2, seed: int = 0, **call: Any,
) -> Interactions:  # fmt: skip
    """Find the tuples of `order` input entries that interact: those whose mixed derivative is not zero.

    Derivatives are taken as finite differences with steps of about one, at `draws` random inputs. Such a difference
    is the mean of the derivative over the box that the steps span, so it is zero where the derivative is. Tuples may
    have repeats, as in x_i² x_j. For a polynomial of degree `order` the tuples are its monomials; for one of higher
    degree, the tuples that its monomials contain.

    Args:
        module: a mixer, any module, or a function of one tensor.
        order: number of entries that interact, 1 to 4.
        x: an input to begin with, (1, N, C), (N, C) or (N,). Keep it small: C(N C + order, order) points are
            evaluated. shape: the shape of a random input, instead of x. Mixers of this package need neither. output:
            (token, channel), or (token, None) for all channels; None: the token that most tuples reach. draws: number
            of random inputs. seed: of the inputs. call: keyword arguments for every call of the module.

    Raises:
        ShapeError: the input is too large.
    """
    check_int("order", order, 1, 4)
    check_draws("draws", draws, 1)
    if output is not None and not (isinstance(output, (tuple, list)) and len(output) == 2):
        raise OptionError("output", shown(output), "(token, channel), or (token, None) for all channels", "")
    probe = Probe(module, x, shape, seed, _CELLS, call)
    n, c = probe.tokens
    out = as_tokens(probe.out_shape, "module")
    size, held = n * c, math.comb(n * c + order, order) * math.prod(out)
    if held > _MAX_VALUES:
        got = f"{size} entries, which need {significant(held, 1)} values at order {order}"
        cure = "Pass a smaller shape=, or a mixer with fewer channels."
        raise ShapeError("shape", got, f"an input that needs at most {significant(_MAX_VALUES, 1)}", cure)
    rows = torch.combinations(torch.arange(size + 1), order, with_replacement=True) - 1  # -1: no step
    entries = rows[(rows >= 0).all(1)]
    strength = torch.zeros(len(entries), math.prod(out), dtype=torch.float64)
    reach = torch.zeros(strength.shape, dtype=torch.bool)
    for draw in range(draws):
        base = probe.x if probe.x is not None and draw == 0 else probe.normal()
        steps = 0.5 + torch.rand(size, generator=probe.generator, dtype=torch.float64)
        padded = torch.cat((steps, torch.zeros(1, dtype=torch.float64)))  # index -1: nothing
        moves = torch.zeros(len(rows), size + 1, dtype=torch.float64).scatter_add_(1, rows % (size + 1), padded[rows])
        values = probe.values(base + moves[:, :size].reshape(-1, *probe.shape))
        differences = _differences(values, rows, entries, size)
        noise = torch.maximum(probe.noise(base, torch.ones_like(base)), EPS * values.abs().amax(0))
        reach |= ~(differences.abs() <= SAFETY * 2**order * noise)  # a value that is not finite counts as reached
        strength += (differences / steps[entries].prod(1, keepdim=True)).abs() / draws
    if output is None:
        output = (int(reach.unflatten(1, out).any(2).sum(0).argmax()), None)
    result = Interactions(order, (n, c), out, (0, None), entries, strength.unflatten(1, out), reach.unflatten(1, out))
    return result.of(*output)


def _differences(values: Tensor, rows: Tensor, entries: Tensor, size: int) -> Tensor:
    """(tuples, outputs): Σ over the subsets S of a tuple of (-1)^(order - |S|) f(x + the steps in S)."""
    order = entries.shape[1]
    place = (size + 1) ** torch.arange(order - 1, -1, -1)
    keys = ((rows + 1) * place).sum(1)  # ascending, as the rows are
    total = torch.zeros(len(entries), values.shape[1], dtype=values.dtype)
    for chosen in itertools.product((False, True), repeat=order):
        subset = torch.where(torch.tensor(chosen), entries + 1, 0).sort(1).values
        where = torch.searchsorted(keys, (subset * place).sum(1))
        total += (-1) ** (order - sum(chosen)) * values[where]
    return total
