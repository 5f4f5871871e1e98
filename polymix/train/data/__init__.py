"""What the domains share: pictures, problems, synthetic data, splits, seeds, boxes, label maps."""
