"""Preparation by several machines: units that any of them makes, workers that share a store, and tasks of Ray."""
