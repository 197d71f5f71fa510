"""Batches: the plan of an epoch, the sequences of a batch, and its frames."""
