"""CPU forms without gradients, in blocks that stay in the cache; each against the eager form beside it in `ops`."""
