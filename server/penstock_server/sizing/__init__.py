"""Sizing: how large the block cache must be for a run, from the order alone."""
