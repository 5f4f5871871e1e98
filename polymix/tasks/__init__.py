"""Training: data and recipes, on Lightning."""
