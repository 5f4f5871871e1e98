"""Attention and candidates at one shape."""

import torch

from polymix.measure.candidates import CandidateTimer
from polymix.mixers import PadreConfig
from polymix.workflows.recommend import Shape


def test_candidates_are_folded_for_inference_alone():
    shape = Shape(tokens=16, dim=8, grid=(4, 4))
    for training in (False, True):
        _, (candidate,) = CandidateTimer("cpu", torch.float32, training).compare(
            shape, {"p": PadreConfig(kernel_size=3)}, 0.05
        )
        assert candidate.folded is not training
