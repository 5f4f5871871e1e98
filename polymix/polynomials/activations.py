"""Polynomials and quotients of polynomials in place of activations, fitted on a range."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from polymix.lens.fits import chebyshev

_NODES = 256  # of a fit
_STEPS = 200  # of L-BFGS, for a denominator of a few numbers


def series(coefficients: Tensor, t: Tensor) -> Tensor:
    """Σ_k c_k T_k(t) by sums and products: Clenshaw's recursion."""
    one, two = torch.zeros_like(t), torch.zeros_like(t)
    for k in range(len(coefficients) - 1, 0, -1):
        one, two = coefficients[k] + 2 * t * one - two, one
    return coefficients[0] + t * one - two


class PolynomialActivation(nn.Module):
    """N(t) = Σ_k c_k T_k(t), t = scale · x + shift: Chebyshev polynomials of the range [low, high].

    Args:
        activation: a function of single numbers. low, high: the range of the fit. degree: of the polynomial.
        learned: the coefficients are parameters to be trained; else buffers.

    Attributes:
        error: the largest of the fit in the range.
    """

    coefficients: Tensor

    def __init__(
        self, activation: Callable[[Tensor], Tensor], low: float, high: float, degree: int, learned: bool = False
    ) -> None:
        super().__init__()
        self.degree = degree
        middle, half = self._set_range(low, high)
        t = torch.cos(torch.pi * (torch.arange(_NODES, dtype=torch.float64) + 0.5) / _NODES)
        with torch.no_grad():
            goal = activation(middle + half * t)
        for name, values in self._fit(t, goal).items():
            part = values.to(torch.get_default_dtype())
            if learned:
                self.register_parameter(name, nn.Parameter(part))
            else:
                self.register_buffer(name, part)
        with torch.no_grad():
            self.error = float((self._value(t) - goal).abs().max())

    def _fit(self, t: Tensor, goal: Tensor) -> dict[str, Tensor]:
        """The coefficients in float64, from values at Chebyshev's nodes."""
        values = 2 / _NODES * chebyshev(t, self.degree).T @ goal
        values[0] /= 2
        return {"coefficients": values}

    def _set_range(self, low: float, high: float) -> tuple[float, float]:
        middle, half = (low + high) / 2, max((high - low) / 2, 1e-6)
        self.scale, self.shift, self.low, self.high = 1 / half, -middle / half, low, high
        return middle, half

    def _value(self, t: Tensor) -> Tensor:
        return series(self.coefficients, t)

    def forward(self, input: Tensor) -> Tensor:  # as PyTorch's activations name it
        return self._value(input * self.scale + self.shift)

    def get_extra_state(self) -> Tensor:
        """The range, which the coefficients belong to: in float64, whatever the type of the weights."""
        return torch.tensor([self.low, self.high], dtype=torch.float64)

    def set_extra_state(self, state: Tensor) -> None:
        self._set_range(*state.tolist())

    def extra_repr(self) -> str:
        return f"degree={self.degree}, range=({self.low:.3g}, {self.high:.3g})"


class RationalActivation(PolynomialActivation):
    """N(t) / (R(t)² + ε), or N(t) / R(t) at ε = 0, with Chebyshev series N and R of t = scale · x + shift.

    With ε above 0 there are no poles, whatever the coefficients. The form is PADRe's (Eq. 20 and `padre`'s eps).

    Args:
        denominator: degree of R. eps: ε. It fixes the scale of N and R, and is no limit of the fit.
        Others: as for PolynomialActivation; degree is N's.
    """

    denominators: Tensor  # the coefficients of R

    def __init__(
        self, activation: Callable[[Tensor], Tensor], low: float, high: float, degree: int, learned: bool = False,
        *, denominator: int = 1, eps: float = 1e-3,
    ) -> None:  # fmt: skip
        self.denominator, self.eps = denominator, eps
        super().__init__(activation, low, high, degree, learned)

    def _fit(self, t: Tensor, goal: Tensor) -> dict[str, Tensor]:
        """L-BFGS on R from several starts, with the best N for each R, which is a matter of least squares."""
        above, below = chebyshev(t, self.degree), chebyshev(t, self.denominator)

        def fitted(r: Tensor) -> tuple[Tensor, Tensor]:
            rows = above / self._divisor(below @ r).unsqueeze(-1)
            n = torch.linalg.lstsq(rows, goal.unsqueeze(-1)).solution
            return n.squeeze(-1), (rows @ n).squeeze(-1) - goal

        size = self.eps**0.5 or 1.0
        identity = size * torch.eye(self.denominator + 1, dtype=torch.float64)
        starts = [*identity, identity.sum(0)]
        best: tuple[float, Tensor] | None = None
        for start in starts:
            r = start.clone().requires_grad_()
            optimizer = torch.optim.LBFGS([r], max_iter=_STEPS, line_search_fn="strong_wolfe", tolerance_change=1e-12)

            def loss(r: Tensor = r, optimizer: Any = optimizer) -> Tensor:
                optimizer.zero_grad()
                with torch.enable_grad():
                    value = fitted(r)[1].square().mean()
                    value.backward()
                return value

            optimizer.step(loss)
            value = float(fitted(r.detach())[1].square().mean())
            if best is None or value < best[0]:
                best = value, r.detach()
        assert best is not None
        return {"coefficients": fitted(best[1])[0].detach(), "denominators": best[1]}

    def _divisor(self, r: Tensor) -> Tensor:
        return r * r + self.eps if self.eps else r

    def _value(self, t: Tensor) -> Tensor:
        return super()._value(t) / self._divisor(series(self.denominators, t))

    def extra_repr(self) -> str:
        over = 2 * self.denominator if self.eps else self.denominator
        return f"degree {self.degree} over {over}, range=({self.low:.3g}, {self.high:.3g})"
