"""The layer of Poly-NL's Eq. 1, a sum over orders of dense, masked or factorised weights, fitted to a module."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from polymix.errors import OptionError, ShapeError, check_choice, check_int, check_number, check_seed, shown
from polymix.lens.degree import degree
from polymix.lens.probe import EPS
from polymix.lens.tensor import WeightTensor, check_factors, contract, tensor
from polymix.limits import check_memory

FORMS = ("dense", "cp", "tucker", "block_sparse")
_SWEEPS, _STARTS = 400, 4  # of alternating least squares
_MAX_ORDER = 8


class PolynomialLayer(nn.Module):
    """The reference layer Y = Σ_d W^[d] ∏ • X + W^[0] (Poly-NL, Eq. 1), with trainable weights in one of four forms.

        dense          w_(a,b,c,d,…), zero outside of a mask
        cp             Σ_r u_r(a) v_r(b) u'_r(c) v'_r(d) …: `rank` products of a vector for each axis
        tucker         a core of the axes' ranks (at most `rank`), with a matrix for each axis
        block_sparse   blocks of `block` numbers along each axis; the rest is zero

    Takes and returns (B, N, C). Made by `PolynomialLayer.fit`.

    Attributes:
        errors: by order, ‖fitted − given‖ / ‖given‖ of the weights. stored: by order, the numbers kept for them.
    """

    def __init__(self, parts: Mapping[int, nn.Module], errors: Mapping[int, float], shape: Sequence[int] = ()) -> None:
        super().__init__()
        self.shape = tuple(shape)  # of the weights of the highest order
        self.parts = nn.ModuleDict({str(order): part for order, part in sorted(parts.items())})
        self.errors = dict(errors)
        self.stored = {int(order): sum(p.numel() for p in part.parameters()) for order, part in self.parts.items()}

    def forward(self, x: Tensor) -> Tensor:
        check_factors(self.shape, x, "(B, N, C)")
        return torch.stack([part(x) for part in self.parts.values()]).sum(0)

    @classmethod
    def fit(
        cls, source: Callable[..., Any] | WeightTensor | Sequence[WeightTensor], *, form: str = "dense",
        rank: int | None = None, block: int = 1, keep: float = 1.0, masks: Mapping[int, Tensor] | None = None,
        tokens: int | None = None, shape: tuple[int, ...] | None = None, seed: int = 0, **call: Any,
    ) -> PolynomialLayer:  # fmt: skip
        """Fit a layer to a polynomial module, or to weights.

        Args:
            source: a mixer, a module, a function of one tensor, or what `lens.tensor` returned, of one order or more.
            form: "dense", "cp", "tucker" or "block_sparse".
            rank: of "cp" and "tucker"; None: the ranks of the axes ("tucker"), which lose nothing.
            block: side of the blocks of "block_sparse", which must divide every axis.
            keep: share of the blocks that stay, those of the largest norm; those of zeros never do.
            masks: by order, which weights may differ from zero, True there.
            tokens, shape: of the input, as for `lens.tensor`. call: keyword arguments for every call of the module.
            seed: of the inputs on which the degree is measured, and of the first factors of "cp".

        Raises:
            OptionError, ShapeError: the source is not a polynomial, or an option does not fit it or has no effect.
        """
        check_choice("form", form, FORMS)
        check_seed("seed", seed)
        check_int("block", block, 1)
        check_number("keep", keep, 0.0, 1.0 + EPS, "a share of at most 1", 0.5)
        if rank is not None:
            check_int("rank", rank, 1)
        if form == "cp" and rank is None:
            raise OptionError("rank", "none for form='cp'", "the number of products", "Pass rank=4, for example.")
        for name, idle, allowed in (
            ("rank", rank is not None and form not in ("cp", "tucker"), "form='cp' or form='tucker'"),
            ("block", block != 1 and form != "block_sparse", "form='block_sparse'"),
            ("keep", keep != 1 and form != "block_sparse", "form='block_sparse'"),
        ):
            if idle:
                raise OptionError(name, f"one for form={form!r}", allowed, f"Leave {name} out, or change the form.")
        weights = _weights(source, tokens, shape, seed, call)
        _check_masks(masks, [item.order for item in weights])
        if form == "cp":
            _check_rank(weights, rank or 1)
        parts: dict[int, nn.Module] = {}
        errors = {}
        for item in weights:
            given = item.weights
            mask = (masks or {}).get(item.order)
            if mask is not None:
                if mask.shape != given.shape or mask.dtype != torch.bool or mask.device != given.device:
                    got = f"{tuple(mask.shape)} of {mask.dtype} on {mask.device} for order {item.order}"
                    raise ShapeError("masks", got, f"{tuple(given.shape)} of torch.bool, as the weights", "")
                given = given.masked_fill(~mask, 0)
            part: nn.Module
            if form == "cp":
                assert rank is not None
                part = _Cp(given, rank, seed)
            elif form == "tucker":
                part = _Tucker(given, rank)
            elif form == "block_sparse":
                part = _Blocks(given, block, keep)
            else:
                part = _Dense(given, mask)
            parts[item.order] = part
            with torch.no_grad():
                lost = float((part.weights() - item.weights).norm())
            errors[item.order] = lost / (float(item.weights.norm()) or 1.0)
        return cls(parts, errors, max((item.weights.shape for item in weights), key=len))


def _weights(
    source: Any, tokens: int | None, shape: tuple[int, ...] | None, seed: int, call: dict[str, Any]
) -> list[WeightTensor]:
    if isinstance(source, (WeightTensor, list, tuple)):
        for name, value in {"tokens": tokens, "shape": shape, **call}.items():
            if value is not None:
                raise OptionError(name, f"{shown(value)} with weights", "an argument for a module", "Leave it out.")
    if isinstance(source, WeightTensor):
        return [source]
    if isinstance(source, (list, tuple)):
        orders = [item.order if isinstance(item, WeightTensor) else None for item in source]
        if not orders or None in orders or len(set(orders)) < len(orders):
            raise OptionError("source", f"a list of orders {orders}", "weights of different orders", "")
        outs = {tuple(item.weights.shape[:2]) for item in source}
        ins = {tuple(item.weights.shape[-2:]) for item in source if item.order}
        if max(len(outs), len(ins)) > 1 or len({(item.weights.dtype, item.weights.device) for item in source}) > 1:
            got = ", ".join(f"{tuple(item.weights.shape)} of {item.weights.dtype}" for item in source)
            raise ShapeError("source", got, "weights for the same tokens and channels, of one dtype", "")
        return list(source)
    where = {"tokens": tokens, "shape": shape, "seed": seed, **call}
    constant = tensor(source, 0, **where)  # which refuses what is no polynomial
    found = degree(source, shape=shape or (None if tokens is None else (1, tokens, source.dim)), seed=seed, **call)
    if found.degree is None or found.degree > _MAX_ORDER:
        raise OptionError("source", str(found), f"a polynomial of a degree up to {_MAX_ORDER}", "")
    return [constant, *(tensor(source, order, **where) for order in range(1, found.degree + 1))]


def _check_masks(masks: Any, orders: list[int]) -> None:
    if masks is None:
        return
    if not isinstance(masks, Mapping) or not all(isinstance(mask, Tensor) for mask in masks.values()):
        raise OptionError("masks", shown(masks), "a dictionary of boolean tensors by order", "Pass {3: mask}.")
    if not set(masks) <= set(orders):
        raise OptionError("masks", f"orders {sorted(map(str, masks))}", f"some of {orders}, the source's", "")


def _check_rank(weights: list[WeightTensor], rank: int) -> None:
    """Alternating least squares holds the products of all axes but the shortest, a column for each of the rank."""
    for item in weights:
        sizes = item.weights.shape
        size = 3 * 8 * (rank * item.weights.numel() / min(sizes) + rank * sum(sizes))
        check_memory("rank", f"a fit of {tuple(sizes)} by {rank:,} products", size, cure="Use a smaller rank.")


class _Dense(nn.Module):
    mask: Tensor | None

    def __init__(self, given: Tensor, mask: Tensor | None) -> None:
        super().__init__()
        self.values = nn.Parameter(given.clone())
        self.register_buffer("mask", mask)

    def weights(self) -> Tensor:
        return self.values if self.mask is None else self.values.masked_fill(~self.mask, 0)

    def forward(self, x: Tensor) -> Tensor:
        return contract(self.weights(), x)


class _Blocks(_Dense):
    """Dense blocks at places of a grid; the reference puts them into the whole tensor."""

    places: Tensor

    def __init__(self, given: Tensor, block: int, keep: float) -> None:
        nn.Module.__init__(self)
        self.shape, self.block = given.shape, block
        if any(size % block for size in given.shape):
            raise OptionError("block", block, f"a divisor of every axis of {tuple(given.shape)}", "")
        cut = given.reshape([part for size in given.shape for part in (size // block, block)])
        axes = range(given.ndim)
        cut = cut.permute(*(2 * i for i in axes), *(2 * i + 1 for i in axes))
        norms = cut.flatten(given.ndim).norm(dim=-1)
        count = min(math.ceil(keep * norms.numel()), int((norms > 0).sum()))
        flat = norms.flatten().topk(count).indices.sort().values
        self.register_buffer("places", flat)
        self.values = nn.Parameter(cut.flatten(given.ndim).flatten(0, given.ndim - 1)[flat].clone())

    def weights(self) -> Tensor:
        axes, grid = len(self.shape), [size // self.block for size in self.shape]
        whole = self.values.new_zeros(math.prod(grid), self.block**axes)
        whole = whole.index_copy(0, self.places, self.values).reshape(*grid, *[self.block] * axes)
        return whole.permute(*(part for i in range(axes) for part in (i, axes + i))).reshape(self.shape)


class _Cp(nn.Module):
    """Σ_r of a vector for each axis: linear in N, C and the rank."""

    def __init__(self, given: Tensor, rank: int, seed: int) -> None:
        super().__init__()
        self.factors = nn.ParameterList(_alternating(given, rank, seed))

    def weights(self) -> Tensor:
        return _products(list(self.factors))

    def forward(self, x: Tensor) -> Tensor:
        sums = x.new_ones(len(x), self.factors[0].shape[1])
        for token, channel in _pairs(self.factors):
            sums = sums * torch.einsum("bnc,nr,cr->br", x, token, channel)
        return torch.einsum("br,nr,cr->bnc", sums, self.factors[0], self.factors[1])


class _Tucker(nn.Module):
    """A core with a matrix for each axis, by the singular vectors of the unfolded tensor."""

    def __init__(self, given: Tensor, rank: int | None) -> None:
        super().__init__()
        core, bases = given, []
        for axis in range(given.ndim):
            u, s, _ = torch.linalg.svd(given.movedim(axis, 0).flatten(1), full_matrices=False)
            count = max(1, int((s > 1e-9 * s[0]).sum())) if rank is None else min(rank, u.shape[1])
            bases.append(u[:, :count])
            core = torch.tensordot(core, u[:, :count], dims=([0], [0]))  # the axis moves to the end; all do, in turn
        self.core, self.bases = nn.Parameter(core.contiguous()), nn.ParameterList(base.contiguous() for base in bases)

    def weights(self) -> Tensor:
        whole = self.core
        for base in self.bases:
            whole = torch.tensordot(whole, base, dims=([0], [1]))
        return whole

    def forward(self, x: Tensor) -> Tensor:
        bases, y = list(self.bases), self.core.expand(len(x), *self.core.shape)
        for token, channel in reversed(_pairs(bases)):
            y = torch.einsum("z...nc,znc->z...", y, torch.einsum("znc,np,cq->zpq", x, token, channel))
        return torch.einsum("zpq,np,cq->znc", y, bases[0], bases[1])


def _pairs(factors: Any) -> list[tuple[Tensor, Tensor]]:
    """Of each factor of a product the matrices of its tokens and of its channels; the first two are the output's."""
    return list(zip(factors[2::2], factors[3::2], strict=True))


def _products(factors: list[Tensor]) -> Tensor:
    whole = factors[0]
    for factor in factors[1:]:
        whole = whole[..., None, :] * factor
    return whole.sum(-1)


def _alternating(given: Tensor, rank: int, seed: int) -> list[Tensor]:
    """The factors (axis, rank) of the best of a few fits by alternating least squares."""
    random = torch.Generator().manual_seed(seed)
    best, least = [], math.inf
    for _ in range(_STARTS):
        factors = [torch.randn(size, rank, generator=random, dtype=given.dtype) for size in given.shape]
        before = math.inf
        for _ in range(_SWEEPS):
            for axis in range(given.ndim):
                others = [factor for place, factor in enumerate(factors) if place != axis]
                design = others[0]
                for factor in others[1:]:
                    design = (design[:, None] * factor[None]).flatten(0, 1)
                goal = given.movedim(axis, 0).flatten(1).T
                factors[axis] = torch.linalg.lstsq(design, goal, driver="gelsd").solution.T
            lost = float((_products(factors) - given).norm())
            if lost < 1e-12 * float(given.norm()) or before - lost < 1e-7 * before:
                break
            before = lost
        if lost < least:
            best, least = factors, lost
    return best
