"""Feeding: batches on their way to the loop, fetched ahead of it within a budget of bytes.

feed      the way in: the batches of some steps, for one iteration; `tally` sums up what all of them counted
runs      steps that are fetched with one request, by a thread that works ahead; `prefetch` is that thread and its budget
item      a batch on its way, with what its frame told
device    batches on a GPU, copied and expanded on a stream of its own; `pinned` is the memory that they are received into
"""
