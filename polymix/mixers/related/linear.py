"""Linear attention with a positive feature map."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import Tensor

from polymix.errors import OptionError, check_choice
from polymix.mixers.config import HeadsConfig
from polymix.mixers.heads import head_count
from polymix.mixers.mixer import INIT_STD, Polynomial
from polymix.mixers.registry import Capabilities, register
from polymix.mixers.related.features import FeatureMixer
from polymix.ops.related.linear_attention import FEATURE_MAPS

# E[φ(q)φ(k)] and E[φ²] for a channel of normal q and k, which give the spread of φ(q)·φ(k) without a denominator.
_MOMENTS = {"elu+1": (1.35, 1.97), "relu": (0.16, 0.5), "identity": (0.0, 1.0)}


class LinearMixer(FeatureMixer):
    """Linear attention: the similarity φ(q)·φ(k) replaces the softmax.

        y_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (φ(q_i) · Σ_j φ(k_j) + 1e-6 n_i)     per head; W_o joins the heads

    The sums run over the n_i tokens j that token i sees. φ is elu(x) + 1 or relu(x). Without `normalize` there is no
    denominator: y_i = φ(q_i) Σ_j φ(k_j)ᵀ v_j / (n_i √d), a mean, which keeps its scale when the length changes. φ may
    then also be the identity, which makes the mixer a polynomial of degree 3. The causal form works in chunks of 128
    tokens; torch.export then needs a fixed length.

    Shapes: (B, N, D) -> (B, N, D), d = D / heads.
    State: d (d + 1) numbers per head.
    Source: Katharopoulos et al. (2020), Eq. 4-7.
    """

    name = "linear"
    capabilities = Capabilities(
        causal=True, cross=True, values=True, masks=frozenset({"padding"}), recurrent=True, sequence="sum"
    )
    config: LinearConfig

    def __init__(self, config: LinearConfig, dim: int, **kw: Any) -> None:
        super().__init__(config, dim)
        spread = 1 / 14  # for a mean of 196 values, weighted or not
        if not config.normalize:
            (mean, square), d = _MOMENTS[config.feature_map], dim // head_count(config.heads, dim)
            spread *= (square**2 + (d - 1) * mean**2) ** 0.5
        self.add_projections(INIT_STD / spread, **kw)

    @property
    def normalize(self) -> bool:  # type: ignore[override]
        return self.config.normalize

    def query_features(self, q: Tensor) -> Tensor:
        q = self.key_features(q)
        return q if self.normalize else q * q.shape[-1] ** -0.5

    def key_features(self, k: Tensor) -> Tensor:
        return FEATURE_MAPS[self.config.feature_map](k)

    @property
    def polynomial(self) -> Polynomial:
        return (
            Polynomial(3, homogeneous=not self.config.bias) if self.config.feature_map == "identity" else Polynomial()
        )


@register(LinearMixer)
@dataclass(frozen=True, kw_only=True)
class LinearConfig(HeadsConfig):
    """Options of linear attention.

    Args:
        feature_map: φ: "elu+1", "relu", or "identity" (only with normalize=False).
        normalize: divide by the sum of the similarities.
    """

    name: ClassVar[str] = "linear"
    output: ClassVar[str] = "linear attention, φ of elu + 1 or relu"
    cost_formula: ClassVar[str] = "4 N D² + 2 N D (d + 1); minus 2 N D if not normalize"
    sees: ClassVar[str] = "everything, the past"
    forms: ClassVar[Mapping[str, Mapping[str, Any]]] = {"paper": {"bias": True}, "equations": {"bias": False}}
    feature_map: str = "elu+1"
    normalize: bool = True

    @property
    def attends(self) -> bool:
        return True

    def check(self) -> None:
        check_choice("feature_map", self.feature_map, FEATURE_MAPS)
        check_choice("normalize", self.normalize, (True, False))
        if self.feature_map == "identity" and self.normalize:
            allowed = "normalize=False with feature_map='identity', as its similarities may sum to zero"
            raise OptionError("normalize", True, allowed, "Pass normalize=False, or use a positive feature map.")
