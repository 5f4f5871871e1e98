"""PADRe's Table 1, executable: mechanisms that are polynomials, or quotients of two, written as PADRe."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import CapabilityError, OptionError, PolymixError, ShapeError, check_int, one_line
from polymix.lens.chains import F64, FORMS, Chain, FormArguments, PadreForm, shift
from polymix.lens.probe import float64_copy
from polymix.limits import bounded, check_memory
from polymix.mixers import PadreMixer, TokenMixer
from polymix.mixers.checks import check_length
from polymix.mixers.modules import check_module
from polymix.numbers import significant


def as_padre(
    mixer: nn.Module,
    n: int,
    *,
    x: Tensor | None = None,
    order: int | None = None,
    decay: str = "exact",
    grid: tuple[int, ...] | None = None,
    dim: int | None = None,
) -> PadreForm | PadreMixer:
    """Write `mixer` as a PADRe, or a rational PADRe, for n tokens (PADRe, Table 1 and Appendix B).

    Exact, to 1e-10 in float64:

    - padre itself, and every module that is linear in its tokens, such as a convolution, pooling or ResMLP's layer
      along the tokens: degree 1. MLP-Mixer's token mixing is none: there is a GELU between its two layers.
    - conv2former without norm and GELU (degree 2), prodpoly (its degree), poly_nl (its order).
    - poly_sa with sigma="identity", linear with feature_map="identity" and normalize=False, non_local with
      form="dot_product", sima with norms frozen at `x`: degree 3.
    - castling with normalize=False and sparse_reg=False: degree 3, plus a linear term.
    - hyena (degree order + 1), and pom with identity activation and gate (degree + 1).
    - qt with form="full": rational, (2·order + 1) / (2·order) per head. At order 1 only where its guard is inactive.

    Approximate:

    - softmax, by the Taylor series of exp up to `order`: rational, as qt.
    - mamba's selective scan, with Δ frozen at its value for `x`, or for no input: degree 3.

    Args:
        mixer: the mixer, or another module that is linear in its tokens.
        n: number of tokens.
        x: input (1, n, D) at which to freeze sima's norms or mamba's Δ.
        order: of the Taylor series, for softmax (default 2).
        decay: for mamba: "exact", exp(Δ A), or "linear", 1 + Δ A (PADRe, Eq. 64).
        grid: of the tokens, for mixers that need one.
        dim: width of the tokens, for a module that is not a TokenMixer.

    Returns:
        A PadreForm, a module on float64 tokens; for padre the mixer itself. It has N × N matrices and one chain per
        channel shift or monomial, so it is for inspection, not for speed. `form.error(x)` measures an approximation.

    Raises:
        CapabilityError: the mixer is neither a polynomial nor a quotient; the message names options that make it one.
    """
    check_int("n", n, 1)
    import polymix.lens.forms  # noqa: F401  registers the forms, and imports all mixers

    own = isinstance(mixer, TokenMixer)
    form, takes = FORMS.get(type(mixer), (None, ()))  # type: ignore[arg-type]
    takes = takes if own else ("dim",)
    passed = {"x": x is not None, "order": order is not None, "decay": decay != "exact", "dim": dim is not None,
             "grid": grid is not None and not own}  # fmt: skip
    for argument, there in passed.items():
        if there and argument not in takes:
            takers = sorted(kind.name for kind, (_, arguments) in FORMS.items() if argument in arguments)
            allowed = " and ".join(takers) or f"a {'module that is no ' if argument == 'dim' else ''}TokenMixer"
            name = mixer.name if isinstance(mixer, TokenMixer) else type(mixer).__name__
            raise OptionError(argument, f"given for {name}", f"an argument for {allowed} only", "Leave it out.")
    if not isinstance(mixer, TokenMixer):
        return _linear(mixer, n, dim)
    check_length(mixer, n)
    if isinstance(mixer, PadreMixer):
        mixer.matrices(n, grid=grid)  # raises if it cannot take n tokens
        return mixer
    if form is None:
        polynomial = mixer.polynomial
        if polynomial.degree == 1:
            return _linear(mixer, n, mixer.dim, grid)
        what = "is neither a polynomial nor a quotient of two"
        if polynomial.degree is not None or polynomial.rational:
            what = "is one, but not among those with a form"
        names = ", ".join(sorted(kind.name for kind in FORMS))
        raise CapabilityError(
            "mixer", f"{mixer.name}, which {what}", names, "Use polymix.lens.degree to see what it is."
        )
    if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != (1, n, mixer.dim)):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError("x", got, f"(1, {n}, {mixer.dim})", "Pass one input; norms differ between inputs.")
    twin: Any = float64_copy(mixer, "mixer")
    matrices = {name: value.cpu() if isinstance(value, Tensor) else value
                for name, value in twin.matrices(n, grid=grid, dtype=F64).items()}  # fmt: skip
    with torch.no_grad(), bounded("n", f"the form for n={n:,}", "Use fewer tokens."):
        result = form(twin, matrices, n, FormArguments(x, order, decay))
    if result.target is None:
        result.target = lambda u: twin(u, grid=grid) if grid else twin(u)
    return result


def _linear(module: nn.Module, n: int, dim: int | None, grid: tuple[int, ...] | None = None) -> PadreForm:
    """A module that is affine in its tokens, measured column by column: one chain of degree 1 per channel shift."""
    check_module(module, "mixer")
    if dim is None:
        raise OptionError("dim", None, "the width of the tokens, for a module that is not a TokenMixer", "Pass dim=.")
    check_int("dim", dim, 1)
    twin = float64_copy(module, "mixer")
    check_memory("n", f"the matrix of {n:,} tokens of {dim:,} channels", 3 * 8 * (n * dim) ** 2)

    def f(u: Tensor) -> Tensor:
        try:
            y = twin(u, grid=grid) if grid else twin(u)
        except PolymixError:
            raise
        except Exception as error:  # whatever a module raises for inputs that it does not take
            reason = one_line(error)[:200]
            allowed = f"a module of one tensor (1, {n}, {dim})"
            raise ShapeError(
                "mixer", f"one that fails: {reason}", allowed, "Wrap it in a module of one tensor."
            ) from error
        if not isinstance(y, Tensor) or y.shape != u.shape:
            got = tuple(y.shape) if isinstance(y, Tensor) else type(y).__name__
            raise ShapeError(
                "mixer", got, f"a module on tokens (B, {n}, {dim})", "Wrap it so that it keeps their shape."
            )
        return y

    with torch.no_grad():
        offset = f(torch.zeros(1, n, dim, dtype=F64))
        basis = torch.eye(n * dim, dtype=F64).view(n * dim, n, dim)
        matrix = torch.cat([f(part) - offset for part in basis.split(256)])  # (n · dim, n, dim): input, output
        probe = torch.randn(2, n, dim, dtype=F64, generator=torch.Generator().manual_seed(0))
        there = torch.einsum("bi,ind->bnd", probe.flatten(1), matrix) + offset
        error = (there - f(probe)).abs().max() / there.abs().max().clamp_min(1e-300)
    if not error <= 1e-9:  # nor if it is NaN
        name = type(module).__name__
        names = ", ".join(sorted(kind.name for kind in FORMS))
        allowed = f"a TokenMixer ({names}) or a module that is linear in its tokens"
        got = f"{name}, which is neither (nonlinear by {significant(float(error), 2)})"
        raise CapabilityError("mixer", got, allowed, "")
    blocks = matrix.view(n, dim, n, dim).permute(3, 2, 1, 0)  # (out channel, out token, in channel, in token)
    channels = torch.arange(dim)
    chains = []
    for r in range(dim):
        a = blocks[channels, :, (channels + r) % dim]  # (out channel, out token, in token)
        if a.any():
            chains.append(Chain(B=[shift(dim, 1, r)], A=[a]))
    chains = chains or [Chain(B=[torch.zeros(dim, dim, dtype=F64)])]
    constant = offset[0]
    return PadreForm(chains, bias=constant if constant.any() else None, target=f)


__all__ = ["as_padre"]
