"""Feeding: batches fetched ahead of the loop, within a budget of bytes.

batch_iterator  entry point: the batches of some steps, for one iteration; `stats_aggregator` sums their statistics
ranges          steps fetched with one request, by a thread that works ahead; `prefetch` is that thread and its budget
item            a batch, with its frame's step, digest and number of tokens
device          batches on a GPU, copied and expanded on a separate stream; `pinned` is their receive memory
"""
