"""The C kernels for the CPU: building the library, passing tensors to it, and the headers that the kernels share."""
