"""The engine: what a domain says as a typed task, its options, the loop, resuming, and the report."""
