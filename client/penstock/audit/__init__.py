"""The audit: proves from the ledgers of a run that each sample was trained on exactly once an epoch, or says which was not.

reading              files: iterations with their steps and digests, and what is damaged
copies               files that are but copies of others
orders               which iterations are of one order of samples
record               of one rank: its starts and iterations
alignment            which starts of a rank are which of the leader's
course               which iterations led to where the run is, and where a later start threw the rest of one away
history              of one rank: what of its record counts, and what was thrown away
positions, intervals steps of ranks: samples of an epoch
account              all ranks: which samples were trained on once, never, or more than once
report, facts, text  the answer, as data, as JSON and in words
compare              what a server says of the same batches
"""

from penstock.audit.report import Report, audit

__all__ = ["Report", "audit"]
