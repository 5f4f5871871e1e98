"""Kernels in C for a CPU, forward and backward: compiled once for the machine at hand, on their first use."""
