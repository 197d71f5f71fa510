"""Penstock's server: owns Parquet shards and serves training batches, each at its own URL."""
