"""Kernels in C for a CPU: the build, the arrays that they take, and the headers that they share."""
