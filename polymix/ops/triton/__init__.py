"""Triton kernels: plain launchers on tensors, imported when first dispatched."""
