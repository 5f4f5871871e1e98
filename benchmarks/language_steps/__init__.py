"""The parts of benchmarks/language.py."""
