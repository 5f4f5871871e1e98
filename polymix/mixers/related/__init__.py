"""Baselines that the papers compare with: linear attentions, convolutional gates, scans, pooled gates.

One file per mixer, under the same contract as the main mixers. Importing a file registers its mixer.
"""

from polymix.mixers.related.additive import AdditiveConfig, AdditiveMixer
from polymix.mixers.related.castling import CastlingConfig, CastlingMixer
from polymix.mixers.related.conv2former import Conv2FormerConfig, Conv2FormerMixer
from polymix.mixers.related.efficient import EfficientConfig, EfficientMixer
from polymix.mixers.related.focused import FocusedConfig, FocusedMixer
from polymix.mixers.related.gated_delta import GatedDeltaConfig, GatedDeltaMixer
from polymix.mixers.related.gc import GcConfig, GcMixer
from polymix.mixers.related.hla import HlaConfig, HlaMixer
from polymix.mixers.related.hydra import HydraConfig, HydraMixer
from polymix.mixers.related.hyena import HyenaConfig, HyenaMixer, HyenaState
from polymix.mixers.related.kda import KdaConfig, KdaMixer
from polymix.mixers.related.knn import KnnConfig, KnnMixer
from polymix.mixers.related.latent_gnn import LatentGnnConfig, LatentGnnMixer
from polymix.mixers.related.linear import LinearConfig, LinearMixer
from polymix.mixers.related.local import LocalConfig, LocalMixer, LocalState
from polymix.mixers.related.mala import MalaConfig, MalaMixer
from polymix.mixers.related.mamba import MambaConfig, MambaMixer, MambaState
from polymix.mixers.related.nala import NalaConfig, NalaMixer
from polymix.mixers.related.non_local import NonLocalConfig, NonLocalMixer
from polymix.mixers.related.performer import PerformerConfig, PerformerMixer
from polymix.mixers.related.pola import PolaConfig, PolaMixer
from polymix.mixers.related.power import PowerConfig, PowerMixer
from polymix.mixers.related.prodpoly import ProdPolyConfig, ProdPolyMixer
from polymix.mixers.related.rala import RalaConfig, RalaMixer
from polymix.mixers.related.relu_linear import ReluLinearConfig, ReluLinearMixer
from polymix.mixers.related.se import SeConfig, SeMixer
from polymix.mixers.related.sima import SimaConfig, SimaMixer
from polymix.mixers.related.tesa import TesaConfig, TesaMixer
from polymix.mixers.related.xca import XcaConfig, XcaMixer

__all__ = [
    "AdditiveConfig", "AdditiveMixer", "CastlingConfig", "CastlingMixer", "Conv2FormerConfig", "Conv2FormerMixer",
    "EfficientConfig", "EfficientMixer", "FocusedConfig", "FocusedMixer", "GatedDeltaConfig", "GatedDeltaMixer",
    "GcConfig", "GcMixer", "HlaConfig", "HlaMixer", "HydraConfig", "HydraMixer", "HyenaConfig", "HyenaMixer",
    "HyenaState", "KdaConfig", "KdaMixer", "KnnConfig", "KnnMixer", "LatentGnnConfig", "LatentGnnMixer",
    "LinearConfig", "LinearMixer", "LocalConfig", "LocalMixer", "LocalState", "MalaConfig", "MalaMixer",
    "MambaConfig", "MambaMixer", "MambaState", "NalaConfig", "NalaMixer", "NonLocalConfig", "NonLocalMixer",
    "PerformerConfig", "PerformerMixer", "PolaConfig", "PolaMixer", "PowerConfig", "PowerMixer", "ProdPolyConfig",
    "ProdPolyMixer", "RalaConfig", "RalaMixer", "ReluLinearConfig", "ReluLinearMixer", "SeConfig", "SeMixer",
    "SimaConfig", "SimaMixer", "TesaConfig", "TesaMixer", "XcaConfig", "XcaMixer",
]  # fmt: skip
