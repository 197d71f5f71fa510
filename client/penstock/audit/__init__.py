"""The audit of a run by its ledgers."""
