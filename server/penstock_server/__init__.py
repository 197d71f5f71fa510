"""Penstock's server: owns Parquet shards and serves training batches, each at a URL of its own."""
