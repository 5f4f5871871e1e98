"""The steps of benchmarks/gpu.py, in their order: tests, ceilings, ops, paper, mixers, others, compiled."""
