"""Table 1 of PADRe, executable: each mechanism that is a polynomial, or a quotient of two, as PADRe."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from polymix.errors import CapabilityError, OptionError, ShapeError, check_int
from polymix.lens.chains import Chain, PadreForm
from polymix.lens.forms import F64, FORMS, shift
from polymix.mixers import PadreMixer, TokenMixer
from polymix.mixers.checks import check_length


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
    """The PADRe, or rational PADRe, that gives what `mixer` gives for n tokens (PADRe, Table 1 and Appendix B).

    Exact (1e-10 in float64): padre itself; every module that is linear in its tokens (MLP-Mixer's token mixing,
    convolution, pooling, linear_floor: degree 1); conv2former without norm and GELU (2); prodpoly (its own degree);
    poly_nl (its order); poly_sa with sigma="identity" (3); linear with the identity for φ and no denominator, and
    non_local with form="dot_product" (3); hyena (order + 1); castling without norms (3 plus a linear term); pom with
    identity activation and gate (k + 1); sima with its norms frozen at `x` (3); qt in its full form (rational, a head
    (2·order + 1) / (2·order); at order 1 where its guard does not act).
    Approximate: softmax, by the Taylor series of exp to `order` (rational, a head likewise); mamba's selective scan
    (3), with Δ held at its value without input, or at `x`. `form.error(x)` says how far it is.

    Args:
        n: number of tokens. grid: where the mixer needs one.
        x: (1, n, D), the input at which sima's norms, or mamba's Δ, are frozen.
        order: of the Taylor series, softmax alone (default 2).
        decay: mamba alone: "exact" exp(Δ A), or "linear" 1 + Δ A, the paper's Eq. 64.
        dim: width of the tokens, for a module that is no TokenMixer.
    Returns:
        A PadreForm: a module on float64 tokens (padre: the mixer itself). A sum of chains where one is not enough, one
        for each channel shift or monomial; it has N × N matrices, to look at and not to run.
    Raises:
        CapabilityError: for a mixer that is neither a polynomial nor a quotient, with the options that make it one.
    """
    check_int("n", n, 1)
    name = mixer.name if isinstance(mixer, TokenMixer) else type(mixer).__name__
    given = {"x": x is not None, "order": order is not None, "decay": decay != "exact", "dim": dim is not None}
    takers = {"x": ("sima", "mamba"), "order": ("softmax",), "decay": ("mamba",), "dim": ()}
    for argument, there in given.items():
        own = argument == "dim" and not isinstance(mixer, TokenMixer)
        if there and name not in takers[argument] and not own:
            allowed = f"only for {' and '.join(takers[argument]) or 'a module that is no TokenMixer'}"
            raise OptionError(argument, f"given for {name}", allowed, "Leave it out.")
    if not isinstance(mixer, TokenMixer):
        if grid is not None:
            raise OptionError("grid", grid, "None for a module that is no TokenMixer", "Leave it out.")
        return _linear(mixer, n, dim)
    check_length(mixer, n)
    if isinstance(mixer, PadreMixer):
        mixer.matrices(n, grid=grid)  # raises where it cannot take n tokens
        return mixer
    if mixer.name not in FORMS:
        if mixer.polynomial.degree == 1:
            return _linear(mixer, n, mixer.dim, grid)
        its = mixer.polynomial
        what = "is neither a polynomial nor a quotient of two"
        if its.degree is not None or its.rational:
            what = "is one, but not among those that are written out here"
        cure = "polymix.lens.degree says what it is."
        raise CapabilityError("mixer", f"{mixer.name}, which {what}", ", ".join(sorted(FORMS)), cure)
    if x is not None and (not isinstance(x, Tensor) or tuple(x.shape) != (1, n, mixer.dim)):
        got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise ShapeError("x", got, f"(1, {n}, {mixer.dim})", "One input: its norms are not another's.")
    wide = copy.deepcopy(mixer).to(F64).eval()
    m = {name: value.cpu() if isinstance(value, Tensor) else value
         for name, value in wide.matrices(n, grid=grid, dtype=F64).items()}  # fmt: skip
    with torch.no_grad():
        form = FORMS[mixer.name](wide, m, n, {"x": x, "order": order, "decay": decay})
    if form.target is None:
        form.target = lambda u: wide(u, grid=grid) if grid else wide(u)
    return form


def _linear(module: nn.Module, n: int, dim: int | None, grid: tuple[int, ...] | None = None) -> PadreForm:
    """A module that is affine in its tokens, read off column by column: a chain of degree 1 for each channel shift."""
    if dim is None:
        raise OptionError("dim", None, "the width of the tokens of a module that is no TokenMixer", "Pass dim=.")
    wide = copy.deepcopy(module).to(F64).eval()

    def f(u: Tensor) -> Tensor:
        try:
            y = wide(u, grid=grid) if grid else wide(u)
        except (TypeError, RuntimeError) as error:
            reason = " ".join(str(error).split())[:200]
            allowed = f"a module of one tensor (1, {n}, {dim})"
            raise ShapeError("mixer", f"one that fails there: {reason}", allowed, "Wrap it in one.") from error
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
    if error > 1e-9:
        name = type(module).__name__
        allowed = f"a TokenMixer ({', '.join(sorted(FORMS))}) or a module that is linear in its tokens"
        raise CapabilityError("mixer", f"{name}, which is neither (it bends by {error:.1e})", allowed, "")
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
