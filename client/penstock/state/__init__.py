"""The training loop's place in its epochs: what it consumed, how a checkpoint tells that, and where it goes on.

progress   what the loop consumed, and what its next iteration runs over
start      where that begins, in memory that the loop shares with its loader workers (shared)
launch     the rounds of one process and its loader workers, and their numbers in the ledger
state      a place as `state_dict` gives it, and whether it fits the data and the order here
resuming   what is left of an epoch behind a state, counted in the steps of the dataset that it is loaded into
"""
