"""Datasets by name: the snapshots of each that are held, what follows when a folder changes, and what people ask of them."""
