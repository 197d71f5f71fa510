"""Batches: the plan of an epoch, the sequences of a batch, its frames, and the look-ups that go with them."""
