"""Functions on tensors, without parameters: what a mixer computes and a kernel would."""
