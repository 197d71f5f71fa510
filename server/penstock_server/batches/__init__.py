"""Batches: the plan of an epoch, the samples of a batch, and its frames."""
