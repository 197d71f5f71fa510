"""Datasets by name: their snapshots, their reaction to changes in a folder, and look-ups.

catalog     all names below the data folder; `known` is their state at one time, `declared` a mixture
resolving   the datasets and snapshots of a spec, with every parameter resolved
dataset     one folder: one thread loads a change in it as a whole; `watch` is the thread that polls
held        the snapshots that a dataset serves at one time: the latest, and older ones whose shards are all present
history     records of snapshots in the cache folder, so that older ones outlive a restart
lookup      answers about a row; `describe` and `inspection` about a dataset, `warnings` about what may go wrong
prepare     fills the index and the cache ahead of time
"""
