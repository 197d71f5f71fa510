"""Shuffle report: how well an order mixes, measured on the served order."""
