"""Datasets by name, and how they follow changes in their folders. Each module uses those above it.

scan       folders below the data folder, and the stats of their files
shard      one Parquet file, as its footer describes it
snapshot   immutable list of shards and their blocks, named by a fingerprint
history    records of snapshots in the cache folder, so that older ones outlive a restart
footers    recipe and shards of a folder; a footer is read once
dataset    DatasetState: what a dataset serves at one time; loads a change in its folder as a whole
catalog    all names below the data folder, mixtures among them; every parameter of a spec resolved
describe   a dataset, a mixture or a spec as JSON, with its `warnings`
"""
