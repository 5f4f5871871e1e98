"""The parts of benchmarks/whole_models.py."""
