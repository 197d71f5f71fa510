"""Datasets by name: the snapshots of each that are held, what follows when a folder changes, and what people ask of them.

catalog     all names below the data folder; `known` is what stands behind them at one time, `declared` a mixture among them
resolving   what a spec is of: its datasets, their snapshots, every parameter resolved
dataset     one folder: a change in it is taken in as a whole, by one thread; `watch` is the thread that looks by itself
held        what a dataset serves at one time: the latest snapshot, and older ones whose shards are all still there
history     what is noted of snapshots in the cache folder, so that older ones outlive a restart
lookup      answers about a row; `describe` and `inspection` about a dataset, `advice` on what may go wrong
prepare     all that is counted and cached, made ahead of time
"""
