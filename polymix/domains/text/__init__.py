"""Language models on text: files, parquet, token shards, or Python's own prose."""
