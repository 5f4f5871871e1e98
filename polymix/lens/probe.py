"""A module as a function of float64 tensors, evaluated at many points. The module itself does not change."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, PolymixError, ShapeError, check_grid_option, check_int, check_seed
from polymix.limits import check_memory
from polymix.mixers import TokenMixer
from polymix.mixers.checks import check_dense
from polymix.mixers.modules import check_module, copied

EPS = torch.finfo(torch.float64).eps
_CHUNK = 1 << 21  # input values per call
_MAX_DRAWS = 1_000_000
_LARGE = 1 << 20  # outputs of fewer numbers always fit into memory
_RANDOM = 1e-6  # of its size: what two calls of a function with the same input may differ by


class Probe:
    """A function f from tensors of `shape` to rows of numbers, in float64 on the CPU.

    A module is deep-copied and put in evaluation mode; any other callable is used as it is. Points are evaluated in
    one call if the module treats the entries of its first axis independently (tested once), else one by one.

    Args:
        argument: of the verb, which the errors name.
        strict: refuse a module without outputs, or whose outputs differ from call to call.
    """

    def __init__(
        self, module: Callable[..., Any], x: Tensor | None, shape: tuple[int, ...] | None, seed: int, cells: int,
        call: dict[str, Any], keep: int = 0, *, argument: str = "module", strict: bool = True,
    ) -> None:  # fmt: skip
        check_seed("seed", seed)
        self.argument = argument
        self.out_shape: tuple[int, ...] = ()
        module = getattr(module, "_orig_mod", module)  # of torch.compile, whose graphs have no second derivatives
        if not callable(module):
            raise OptionError(argument, type(module).__name__, "a module, or a function of one tensor", "")
        self.module = module
        self.function = float64_copy(module, argument) if isinstance(module, nn.Module) else module
        self.call = {key: _as_float64(key, value) for key, value in call.items()}
        self.calls = 0
        self.generator = torch.Generator().manual_seed(seed)
        self.shape, self.x = self._choose(x, shape, cells, keep)
        start = self.normal()
        with torch.no_grad():
            first = self(start)
            self.out_shape = tuple(first.shape)
            if strict:
                self._check_function(first, self(start))
        self.batched = self._treats_entries_independently()

    def __call__(self, x: Tensor) -> Tensor:
        """The module's output for one input; the first of several outputs."""
        self.calls += 1
        with torch.random.fork_rng(devices=[]), torch.autocast("cpu", enabled=False):
            torch.default_generator.manual_seed(self.calls)  # a new seed each time, to expose random functions
            try:
                y = self.function(x.clone(), **self.call)  # which it may write to
            except PolymixError:
                raise
            except Exception as error:  # whatever a module raises for inputs that it does not take
                reason = " ".join(str(error).split()) or type(error).__name__
                got = f"{type(error).__name__} ({reason[:200]}) for a float64 input {tuple(x.shape)}"
                cure = "Pass shape= of an input that it takes. Its own tensors must follow the dtype of the input."
                raise ShapeError(self.argument, got, "a module that takes it", cure) from error
        if isinstance(y, (tuple, list)) and y:
            y = y[0]
        if not isinstance(y, Tensor):
            raise OptionError(self.argument, f"one that returns {type(y).__name__}", "one that returns a tensor", "")
        check_dense(self.argument, y, OptionError)
        if y.is_meta:
            raise OptionError(self.argument, "one that returns a tensor on the meta device", "one with values", "")
        if y.numel() > _LARGE:
            check_memory(self.argument, f"an output {tuple(y.shape)}", 8 * y.numel(), cure="Use a smaller shape.")
        return (torch.view_as_real(y) if y.is_complex() else y).to(torch.float64)

    def _check_function(self, first: Tensor, again: Tensor) -> None:
        if first.numel() == 0:
            raise OptionError(self.argument, f"outputs {self.out_shape}", "at least one number", "")
        size = _RANDOM * first.abs().nan_to_num(posinf=0.0).max()
        if first.shape != again.shape or not torch.allclose(first, again, 0.0, float(size), equal_nan=True):
            got = "other outputs in a second call with the same input"
            raise OptionError(self.argument, got, "a function of its input", "Seed what is random in it.")

    def check_finite(self, values: Tensor) -> Tensor:
        """The values. Raises OptionError where one is not finite, of which no size and no distance can be told."""
        if not values.isfinite().all():
            got = f"{int((~values.isfinite()).sum()):,} outputs of {values.numel():,} that are not finite"
            raise OptionError(self.argument, got, "finite outputs for the inputs tried", "")
        return values

    def check_points(self, argument: str, points: int, more: float = 0) -> None:
        """Raise OptionError unless so many inputs with their outputs, and `more` numbers, fit into memory."""
        size = 8 * (points * (math.prod(self.shape) + math.prod(self.out_shape)) + more)
        what = f"{points:,} inputs {self.shape} with what is computed from them"
        check_memory(argument, what, size, cure="Pass a smaller shape=, or fewer draws=.")

    def values(self, points: Tensor) -> Tensor:
        """(P, *shape) -> (P, outputs)."""
        with torch.no_grad():
            rows = max(1, _CHUNK // max(1, math.prod(self.shape))) if self.batched else 1
            parts = points.split(rows)
            outputs = [self(part.flatten(0, 1) if self.batched else part[0]) for part in parts]
            for part, y in zip(parts, outputs, strict=True):
                if y.numel() != len(part) * math.prod(self.out_shape):
                    got = f"outputs {tuple(y.shape)} and {self.out_shape} for inputs of one shape"
                    raise ShapeError(self.argument, got, "outputs of one shape", "Pad them.")
            return torch.cat([y.reshape(len(part), -1) for part, y in zip(parts, outputs, strict=True)])

    def normal(self, *lead: int) -> Tensor:
        """Standard normal numbers (*lead, *shape) from the probe's own generator."""
        return torch.randn(*lead, *self.shape, generator=self.generator, dtype=torch.float64)

    def noise(self, x: Tensor, direction: Tensor) -> Tensor:
        """(outputs,) rounding noise of f near x, from high-order differences over steps so small that f is straight.

        Each output uses the smallest of three steps at which it changes at all. An output that does not change was
        rounded coarsely inside f, so a larger step is needed to see its noise.
        """
        noise, still = torch.zeros(0), torch.ones(0, dtype=torch.bool)
        for step in (1.61e-10, 1.37e-8, 1.13e-6):
            ladder = torch.arange(-6, 7, dtype=torch.float64).view(-1, *(1,) * x.ndim) * step
            table = self.values(x + ladder * direction)
            flat = (table.diff(dim=0) == 0).sum(0) > 6
            sizes = []
            for order in range(1, 7):
                table = table.diff(dim=0)
                if order >= 4:
                    gain = math.factorial(2 * order) / math.factorial(order) ** 2
                    sizes.append((table.square().mean(0) / gain).sqrt())
            here = torch.stack(sizes).amin(0)
            noise, still = (torch.where(still, here, noise), still & flat) if len(noise) else (here, flat)
            if not still.any():
                break
        return noise

    @property
    def tokens(self) -> tuple[int, int]:
        """(N, C) of the input, read as tokens."""
        return as_tokens(self.shape, "shape")

    @property
    def grid(self) -> tuple[int, ...] | None:
        """The grid of the tokens after the prefix; None if unknown."""
        built = self.function.config.built_grid if isinstance(self.function, TokenMixer) else None
        grid = self.call.get("grid") or built
        return None if grid is None else tuple(grid)

    @property
    def prefix(self) -> int:
        """Number of tokens before the grid."""
        return int(self.function.config.prefix) if isinstance(self.function, TokenMixer) else 0

    def _choose(self, x: Tensor | None, shape: Any, cells: int, keep: int) -> tuple[tuple[int, ...], Tensor | None]:
        if x is not None:
            if shape is not None:
                raise OptionError("shape", shape, "x= or shape=, not both", "Leave shape out; x has one.")
            x = finite_float64("x", x)
            return tuple(x.shape), x
        if shape is not None:
            whole = isinstance(shape, (tuple, list, torch.Size)) and len(shape) > 0
            if not whole or any(type(size) is not int or size < 1 for size in shape):
                raise ShapeError(
                    "shape", repr(shape), "a tuple of sizes of at least 1", "Pass shape=(1, 6, 4), for example."
                )
            check_memory("shape", f"points of shape {tuple(shape)}", 16 * 8 * math.prod(shape))
            return tuple(shape), None
        if not isinstance(self.function, TokenMixer):
            got = f"none for a {type(self.module).__name__}"
            raise ShapeError("shape", got, "the shape of one input, or x=", "Pass shape=(1, 6, 4), for example.")
        return self._small_input(self.function, cells, keep), None

    def _small_input(self, mixer: TokenMixer, cells: int, keep: int) -> tuple[int, ...]:
        """The shape (1, N, D) of an input with about `cells` tokens.

        A mixer built for a grid gets a smaller one if it takes one. A grid of up to `keep` tokens is used whole.
        """
        built, axes, call_grid = mixer.config.built_grid, mixer.capabilities.grids, self.call.get("grid")
        if call_grid is not None:
            check_grid_option(call_grid, (1, 2, 3))
        side = max(2, math.ceil(cells ** (1 / len(built)) - 1e-9)) if built else cells
        grids: list[tuple[int, ...] | None] = [call_grid] if call_grid else []
        if not call_grid and built:
            small = tuple(built if math.prod(built) <= keep else (min(size, side) for size in built))
            grids = [small, tuple(built)] if axes and small != tuple(built) else [tuple(built)]
        elif not call_grid:
            grids = [None] if not axes or 1 in axes or mixer.capabilities.any_length else []
            if 2 in axes:
                rows = max(2, math.isqrt(cells))
                grids.append((rows, -(-cells // rows)))
        reason: PolymixError | None = None
        for grid in grids:
            shape = (1, self.prefix + (cells if grid is None else math.prod(grid)), mixer.dim)
            options = {} if grid in (None, call_grid, built) else {"grid": grid}
            try:
                with torch.no_grad():
                    mixer(torch.zeros(shape, dtype=torch.float64), **self.call, **options)
            except TypeError as error:  # of a keyword that no call takes
                raise OptionError("call", " ".join(str(error).split()), "keyword arguments of a call", "") from error
            except (ShapeError, OptionError) as error:  # other errors would come with any input
                reason = reason or error
                continue
            self.call.update(options)
            return shape
        got = f"none, and no default input fits this {mixer.name} ({reason})"
        raise ShapeError("shape", got, "an input that the mixer takes", "Pass shape=(1, N, D) or x=.")

    def _treats_entries_independently(self) -> bool:
        if len(self.shape) < 2 or any(isinstance(value, Tensor) for value in self.call.values()):
            return False
        pair = self.normal(2)
        with torch.no_grad():
            alone = torch.stack([self(point).flatten() for point in pair])
            try:
                together = self(pair.flatten(0, 1)).reshape(2, -1)
            except (PolymixError, RuntimeError):
                return False
        if together.shape != alone.shape or alone.numel() == 0:
            return False
        size = alone.abs().amax().clamp_min(1e-300)
        return bool(((together - alone).abs() <= 1e-10 * size).all())


def finite_float64(argument: str, x: Any) -> Tensor:
    """The input in float64 on the CPU, alone. Raises ShapeError, OptionError: it has no finite numbers."""
    if not isinstance(x, Tensor) or not x.is_floating_point() or x.numel() == 0:
        got = f"{tuple(x.shape)} of {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError(argument, got, "a floating-point tensor", "Pass x=torch.randn(1, 6, 4), for example.")
    check_dense(argument, x, ShapeError)
    x = _as_float64(argument, x)
    if not x.isfinite().all():
        raise OptionError(argument, "numbers that are not finite", "finite numbers", "")
    return x


def check_draws(argument: str, value: Any, least: int) -> None:
    """Raise OptionError unless `value` is a number of random inputs or directions that can be gone through."""
    check_int(argument, value, least, _MAX_DRAWS)


def float64_copy(module: Any, argument: str = "module") -> nn.Module:
    """A copy of a module in float64 on the CPU, in evaluation mode, its parameters frozen."""
    check_module(module, argument)
    tensors = (*module.parameters(), *module.buffers())
    if any(tensor.is_meta for tensor in tensors):
        raise OptionError(argument, "a module on the meta device", "one with weights", "Move it to the CPU.")
    what = f"a copy of the {type(module).__name__} in float64"
    check_memory(argument, what, 2 * 8 * sum(tensor.numel() for tensor in tensors))
    twin: nn.Module = copied(module, argument).cpu().double().eval().requires_grad_(False)
    for part in (*twin.parameters(), *twin.buffers()):
        if part.is_complex():
            part.data = part.data.to(torch.complex128)
    return twin


def _as_float64(argument: str, value: Any) -> Any:
    """An argument of the call, on the CPU and in float64 if it is a floating-point tensor."""
    if isinstance(value, Tensor):
        if value.is_meta:
            raise ShapeError(argument, "a tensor on the meta device", "one with values", "Make it on the CPU.")
        return value.detach().to("cpu", torch.float64 if value.is_floating_point() else value.dtype)
    return value


def as_tokens(shape: tuple[int, ...], argument: str) -> tuple[int, int]:
    """(N, C) of a shape (1, N, C), (N, C), (N,) or ()."""
    sizes = shape[1:] if len(shape) == 3 and shape[0] == 1 else shape
    if len(sizes) > 2:
        cure = "Wrap the module in a function that takes (1, N, C)."
        raise ShapeError(argument, shape, "(1, N, C), (N, C) or (N,): tokens with their channels", cure)
    tokens, channels = (*sizes, 1, 1)[:2]
    return tokens, channels
