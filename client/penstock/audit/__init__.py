"""The audit: proves from the ledgers of a run that each sample was trained on exactly once an epoch, or lists the others.

reading    files: sections of iterations with their steps and digests, and damaged lines
intervals  sets of numbers as intervals; steps of ranks to positions in an epoch
lineage    starts of all ranks, the parent of each, and the steps that the last one kept
account    each epoch: samples trained on once, never, or more than once
report     the result as data and as JSON; text: the result for people
compare    what a server returns for the same batches
"""
