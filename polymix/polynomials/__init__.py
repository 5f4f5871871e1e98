"""Turn a whole network into a polynomial of its input, or a quotient: activations fitted, batch norms folded, the rest
checked.
"""

from __future__ import annotations

import copy
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.fusion import fuse_conv_bn_eval, fuse_linear_bn_eval
from torch.utils._python_dispatch import TorchDispatchMode

from polymix.convert.replacement import Replacement
from polymix.errors import (
    CapabilityError,
    DataError,
    InputError,
    OptionError,
    PolymixError,
    check_choice,
    check_int,
    check_number,
    one_line,
)
from polymix.inference.forwards import has_hooks
from polymix.lens import DegreeResult
from polymix.lens import degree as measured_degree
from polymix.mixers import TokenMixer
from polymix.mixers.checks import check_dense
from polymix.mixers.modules import check_module
from polymix.numbers import aligned, significant
from polymix.polynomials.activations import PolynomialActivation, RationalActivation

ACTIVATIONS = (
    nn.GELU, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.SiLU, nn.Mish, nn.Softplus, nn.Sigmoid,
    nn.Tanh, nn.Hardswish, nn.Hardsigmoid, nn.Hardtanh, nn.LogSigmoid, nn.Softsign,
)  # fmt: skip
BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
# Operators of PyTorch that compute sums and products, or only move numbers. "div" and "pow" are looked at.
_NAMES = """
    add sub rsub mul neg mm bmm addmm baddbmm addmv mv dot linear matmul convolution addcmul square sum mean cumsum
    avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d view _unsafe_view reshape t transpose
    permute expand unsqueeze squeeze cat stack slice select clone _to_copy to detach constant_pad_nd split
    split_with_sizes unbind alias flip roll index index_select gather zeros ones full zeros_like ones_like new_zeros
    new_ones arange empty empty_like copy fill lift_fresh scalar_tensor as_strided unfold mkldnn_convolution repeat
    _reshape_alias upsample_nearest2d upsample_bilinear2d pixel_shuffle diagonal
    _record_function_enter_new _record_function_exit
"""
POLYNOMIAL = frozenset(_NAMES.split())
RATIONAL = POLYNOMIAL | {"reciprocal"}
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_HOOKS = (
    "_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called", "_forward_pre_hooks",
    "_forward_pre_hooks_with_kwargs", "_backward_hooks", "_backward_pre_hooks",
)  # fmt: skip
_MARGIN = 0.1  # of the measured range, on both sides: other inputs go beyond it


class ChannelAffine(nn.Module):
    """x · weight + bias by channel (axis 1): a batch norm at inference that no layer before it can take up."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        scale = (norm.running_var + norm.eps).rsqrt() * (1 if norm.weight is None else norm.weight.detach())
        shift = (0 if norm.bias is None else norm.bias.detach()) - norm.running_mean * scale
        self.weight, self.bias = nn.Parameter(scale), nn.Parameter(shift)

    def forward(self, input: Tensor) -> Tensor:  # as PyTorch's norms name it
        shape = (1, -1, *(1,) * (input.ndim - 2))
        return input * self.weight.view(shape) + self.bias.view(shape)


class PolynomialReport(Replacement):
    """What `polymix.polynomialize` did. Printing it shows a table.

    Attributes:
        model: the polynomial or quotient, which is the model itself.
        denominator: the degree of R in its activations; 0: they are polynomials.
        activations: by name, (class, low, high, largest error of the fit in that range).
        folded: the batch norms, by name, and what each became.
        error: ‖new − old‖ / ‖old‖ of the model's output on the first batch.
        undone: whether `undo` was called.
        accuracy, metric, kept: what `polymix.distill` measured, by stage.
    """

    def __init__(self, model: nn.Module, denominator: int = 0) -> None:
        super().__init__(model)
        self.model, self.denominator, self.undone, self.error = model, denominator, False, 0.0
        self.activations: dict[str, tuple[str, float, float, float]] = {}
        self.folded: dict[str, str] = {}
        self._places: list[tuple[nn.Module, str, nn.Module, nn.Module]] = []
        self._training: dict[nn.Module, bool] = {}

    def undo(self) -> nn.Module:
        """Put the layers back as they were, with the weights that they had before a distillation; return the model.

        Each layer is in training mode or not, as before.
        """
        if self.undone:
            raise OptionError("report", "one that was undone already", "one whose polynomials are in place", "")
        self._withdraw()
        for part, mode in self._training.items():
            part.training = mode
        return self.model

    def _put(self, parent: nn.Module, key: str, new: nn.Module) -> None:
        old = parent.get_submodule(key)
        self._before[f"{len(self._places)}.{key}"] = old
        self._places.append((parent, key, old, new))
        setattr(parent, key, new)

    def _withdraw(self) -> nn.Module:
        for parent, key, old, _ in self._places:
            setattr(parent, key, old)
        self._exchange()
        self.undone = True
        return self.model

    def _install(self) -> nn.Module:
        self._exchange()
        for parent, key, _, new in self._places:
            setattr(parent, key, new)
        self.undone = False
        return self.model

    def degree(self, x: Tensor, max_degree: int = 32) -> DegreeResult:
        """The degree of the whole network at an input, as `lens.degree` measures it.

        With a denominator that is `.rational`, up to degree 20: a sum of n quotients has one of n times the degree.
        """
        return measured_degree(self.model, x, max_degree=max_degree, max_rational=20 if self.denominator else 0)

    def __str__(self) -> str:
        rows = [("layer", "was", "range", "largest error")]
        rows += [(name, was, f"{significant(low, 3)} … {significant(high, 3)}", significant(error, 2))
                 for name, (was, low, high, error) in self.activations.items()]  # fmt: skip
        norms = [f"{name}: {how}" for name, how in self.folded.items()]
        return "\n".join([*aligned(rows), *norms, f"relative error of the output: {significant(self.error, 2)}"])


def polynomialize(
    model: nn.Module, data: Tensor | Iterable[Any], *, degree: int = 3, denominator: int = 0, eps: float = 1e-3,
    learned: bool = False,
) -> PolynomialReport:  # fmt: skip
    """Turn a whole network into a polynomial of its input, or a quotient of two, in place.

    Activations become Chebyshev polynomials fitted on the range that they see on `data`, batch norms are folded, and
    every other operator must be a sum or a product. Mixers must declare to be polynomials. With a denominator,
    activations become quotients N / (R² + ε), which have no poles, and mixers and operators may be quotients too. The
    model is used, and returned, in evaluation mode; train it by `polymix.distill` or your own loop.

    Args:
        model: a network. data: its input, or batches of inputs; of a tuple or list the first entry is the input.
        degree: of each activation, or its N, 1 to 15.
        denominator: degree of R, 0 to 4; 0: polynomials.
        eps: ε. 0: N / R, which may have poles.
        learned: make the coefficients parameters.

    Raises:
        CapabilityError: a module is no polynomial or quotient; the error names it, and the model stays as it was.
        OptionError, DataError: an option is out of range, or there are no data, or numbers that are not finite.
        InputError: the model fails on the data.
    """
    check_module(model)
    check_int("degree", degree, 1, 15)
    check_int("denominator", denominator, 0, 4)
    check_number("eps", eps, 0.0, math.inf, "a number of at least 0", 1e-3)
    check_choice("learned", learned, (True, False))
    batches = _batches(data)
    if isinstance(model, (*ACTIVATIONS, *BATCH_NORMS)):
        raise OptionError("model", type(model).__name__, "a network that has layers", "Wrap it in nn.Sequential.")
    report = PolynomialReport(model, denominator)
    fit: Callable[..., PolynomialActivation] = partial(PolynomialActivation, degree=degree, learned=learned)
    if denominator:
        fit = partial(RationalActivation, degree=degree, learned=learned, denominator=denominator, eps=eps)
    report._training = {part: part.training for part in model.modules()}
    model.eval()
    inner = getattr(model, "_orig_mod", model)  # of torch.compile, whose graphs know of no hooks
    try:
        with torch.no_grad():
            seen = _Seen(inner, batches)
            _replace(inner, report, seen, fit)
            with _Recorder(inner, bool(denominator)) as recorder, recorder.modules():
                after = _first(inner(batches[0]))
    except BaseException:
        report.undo()
        raise
    before = seen.output.double()
    report.error = float((after.double() - before).norm() / before.norm().clamp_min(1e-30))
    return report


def _batches(data: Any) -> list[Tensor]:
    if not isinstance(data, Iterable):
        raise DataError("data", type(data).__name__, "a tensor, or batches of inputs", "Pass a list of tensors.")
    parts: list[Any] = [data] if isinstance(data, Tensor) else list(data)
    batches: list[Any] = [part[0] if isinstance(part, (tuple, list)) and part else part for part in parts]
    if not batches or not all(isinstance(part, Tensor) for part in batches):
        raise DataError("data", "no batch of tensors", "batches of inputs", "Pass a list of tensors, for example.")
    for place, part in enumerate(batches):
        check_dense("data", part, DataError)
        if part.is_meta:
            raise DataError("data", "a meta tensor", "tensors that hold numbers", "Pass inputs to measure ranges on.")
        if not part.numel() or not part.isfinite().all():
            got = f"{'numbers that are not finite' if part.numel() else 'no numbers'} in batch {place}"
            raise DataError("data", got, "finite inputs", "Leave it out: ranges are measured on all batches.")
    return batches


def _first(output: Any) -> Tensor:
    found = output[0] if isinstance(output, (tuple, list)) else output
    if not isinstance(found, Tensor):
        raise OptionError("model", f"one that returns {type(found).__name__}", "one that returns a tensor", "")
    return found


def _own(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The modules outside of mixers, which are polynomials as a whole or not at all."""
    inside = [f"{name}." for name, module in model.named_modules() if isinstance(module, TokenMixer)]
    for name, module in model.named_modules():
        if not any(name.startswith(prefix) for prefix in inside):
            yield name, module


def _children(module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Each child by its name, also one that comes again, which `named_children` leaves out."""
    return ((name, child) for name, child in module._modules.items() if child is not None)


class _Seen:
    """What a model's layers do on all batches.

    Attributes:
        ranges: the smallest and largest input of each activation. kinds: their device, and the type of a fit for them.
        calls: how often each module was called.
        axes: of a batch norm's input, which differ where its channels are not the layer's before it.
        output: for the first batch.
    """

    def __init__(self, model: nn.Module, batches: Sequence[Tensor]) -> None:
        self.ranges: dict[nn.Module, tuple[float, float]] = {}
        self.kinds: dict[nn.Module, dict[str, Any]] = {}
        self.calls: Counter[nn.Module] = Counter()
        self.axes: dict[nn.Module, int] = {}
        with ExitStack() as stack:
            for name, module in _own(model):
                hook = module.register_forward_pre_hook(partial(self._look, name), with_kwargs=True)
                stack.callback(hook.remove)
            try:
                outputs = [_first(model(batch)) for batch in batches]
            except PolymixError:
                raise
            except Exception as error:  # whatever a model raises for inputs that it does not take
                got = f"one with which a {type(model).__name__} fails ({one_line(error)[:300]})"
                cure = "Shape, type and device must be those of its weights."
                raise InputError("data", got, "inputs that the model takes", cure) from error
        self.output = outputs[0]
        if not all(bool(output.isfinite().all()) for output in outputs):
            cure = "Scale them, or mend the weights."
            raise DataError("data", "inputs for which the model's output is not finite", "finite outputs", cure)

    def _look(self, name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self.calls[module] += 1
        if isinstance(module, BATCH_NORMS):
            self.axes[module] = (*args, *kwargs.values())[0].ndim
        if isinstance(module, ACTIVATIONS):
            x = (*args, *kwargs.values())[0]
            self.kinds[module] = {"device": x.device, "dtype": torch.promote_types(x.dtype, torch.float32)}
            low, high = map(float, torch.aminmax(x))
            if not math.isfinite(high - low):
                got, cure = f"inputs for which those of {name} are not finite", "Scale them, or mend the weights."
                raise DataError("data", got, "finite numbers in all layers", cure)
            before = self.ranges.get(module, (low, high))
            self.ranges[module] = min(low, before[0]), max(high, before[1])


def _replace(
    model: nn.Module, report: PolynomialReport, seen: _Seen, fit: Callable[..., PolynomialActivation]
) -> None:  # fmt: skip
    new: dict[nn.Module, nn.Module] = {}
    for name, module in _own(model):
        if isinstance(module, TokenMixer) and module.polynomial.degree is None:
            if report.denominator and module.polynomial.rational is not None:
                continue
            got = f"{name or 'model'}, a {module.name} that is no polynomial{' or quotient' * bool(report.denominator)}"
            cure = 'padre and poly_nl are polynomials, and pom with activation="identity", gate="identity".'
            raise CapabilityError("model", got, "mixers that are", f"Convert it first: {cure}")
        if isinstance(module, ACTIVATIONS) and module in seen.ranges:
            low, high = seen.ranges[module]
            margin = _MARGIN * (high - low)
            fitted = new[module] = fit(module, low - margin, high + margin).to(**seen.kinds[module])
            report.activations[name] = type(module).__name__, fitted.low, fitted.high, fitted.error
        if type(module).forward is nn.Sequential.forward:
            _fold(name, module, new, report, seen)
    for name, module in _own(model):
        if isinstance(module, BATCH_NORMS) and module not in new and module.running_mean is not None:
            new[module] = ChannelAffine(module)
            report.folded[name] = "a factor and a sum for each channel"
    for parent in list(model.modules()):
        for key, child in list(_children(parent)):
            if child in new:
                reference = next(child.parameters(), None)
                report._put(parent, key, new[child] if reference is None else new[child].to(reference))
                for hooks in _HOOKS:  # shared, so that a handle removes its hook from both
                    setattr(new[child], hooks, getattr(child, hooks))


def _fold(name: str, layers: nn.Module, new: dict[nn.Module, nn.Module], report: PolynomialReport, seen: _Seen) -> None:
    """Fold each batch norm that follows a convolution or a linear layer into a copy of that.

    Neither may be called elsewhere too, the norm's channels must be the layer's, and the layer may have no hooks: they
    see its outputs, or make its weights.
    """
    for (before, layer), (key, norm) in pairwise(list(_children(layers))):
        if not isinstance(norm, BATCH_NORMS) or norm.running_mean is None or norm in new or layer in new:
            continue
        if not seen.calls[layer] == seen.calls[norm] == seen.calls[layers] or any(map(has_hooks, (layer, norm))):
            continue
        if isinstance(layer, _CONVOLUTIONS) and type(layer) in _CONVOLUTIONS and seen.axes[norm] == layer.weight.ndim:
            new[layer] = fuse_conv_bn_eval(layer, norm)  # a subclass may make its weights in its forward
        elif type(layer) is nn.Linear and seen.axes[norm] == 2:
            new[layer] = fuse_linear_bn_eval(copy.deepcopy(layer), norm)
        else:
            continue
        new[norm] = nn.Identity()
        report.folded[f"{name}.{key}".lstrip(".")] = f"folded into {before}"


class _Recorder(TorchDispatchMode):
    """Raises CapabilityError at the first operator that is no sum or product, with the module that called it."""

    def __init__(self, model: nn.Module, rational: bool) -> None:
        super().__init__()
        self.model, self.rational, self.stack = model, rational, [""]
        self.mixers = {name for name, module in model.named_modules() if isinstance(module, TokenMixer)}

    @contextmanager
    def modules(self) -> Iterator[None]:
        with ExitStack() as hooks:
            for name, module in self.model.named_modules():
                hooks.callback(module.register_forward_pre_hook(lambda *_, name=name: self.stack.append(name)).remove)
                hooks.callback(module.register_forward_hook(lambda *_: self._leave()).remove)
            yield

    def _leave(self) -> None:
        self.stack.pop()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__.rstrip("_")
        declared = any(place in self.mixers for place in self.stack)
        if not declared and not self._allowed(name, args, kwargs or {}):
            where = self.stack[-1]
            kind = type(self.model.get_submodule(where)).__name__
            got = f"{where or 'model'}, a {kind} that computes {name}"
            allowed = "sums, products and quotients alone" if self.rational else "sums and products alone"
            cure = "Replace it first: a LayerNorm by a BatchNorm, a MaxPool by an AvgPool, F.relu by nn.ReLU."
            raise CapabilityError("model", got, allowed, cure)
        return func(*args, **(kwargs or {}))

    def _allowed(self, name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
        if name == "div":
            return (self.rational or not isinstance(args[1], Tensor)) and kwargs.get("rounding_mode") is None
        if name in ("_to_copy", "copy"):  # to integers it rounds
            made = kwargs.get("dtype", args[0].dtype) if name == "_to_copy" else args[0].dtype
            return bool(made is None or made.is_floating_point or not args[-1].is_floating_point())
        if name == "pow":
            whole = isinstance(args[0], Tensor) and isinstance(args[1], int)
            return whole and (self.rational or args[1] >= 0)
        return name in (RATIONAL if self.rational else POLYNOMIAL)
