"""What benchmarks/pretrained.py does for each model."""
