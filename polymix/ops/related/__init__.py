"""Ops of the baselines that the papers compare with, in plain PyTorch."""
