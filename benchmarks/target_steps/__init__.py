"""The parts of benchmarks/targets.py."""
