"""What hosts over packed points share."""

from __future__ import annotations

from torch import Tensor, nn


class PointNorm(nn.BatchNorm1d):
    """Batch norm over points; one point alone has no variance, and is normalised by the running statistics."""

    def __init__(self, dim: int, eps: float = 1e-3, momentum: float = 0.01) -> None:
        super().__init__(dim, eps=eps, momentum=momentum)

    def forward(self, x: Tensor) -> Tensor:
        if self.training and len(x) < 2:
            return nn.functional.batch_norm(
                x, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps
            )
        return super().forward(x)
