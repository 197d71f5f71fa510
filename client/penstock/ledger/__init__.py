"""Ledger: one line per batch that a training loop got, so that `penstock audit` can prove a run's samples.

Each process has a separate file, and each start of the run appends to it. It is text, to read and search:

    begin {"ledger": 4, "run": "5f0c77aa01b2c3d4", "start": ..., "parent": ..., "epoch": 0, "step": 0, "spec": {...}} 1c9a0d1f
                   0 9f3c0d11a2b4c5d6 8c0d1f22
                   1 77aa0d11a2b4c5d6 09e3b7aa
    end 5b1e2c3d

begin    an iteration over the dataset begins, or continues after lines of another; the fields are those of Begin
a step   the loop got the batch of this step: the step in 16 columns, the batch's digest in 16 hex digits
end      the epoch ended: the loop requested a batch after the last one
lost 3   the three lines before this one could not be written

The last word of a line is its checksum in 8 hex digits: the CRC-32 of the text before it, without the space between them.
After a begin line, the CRC-32 of a line also covers the begin line's checksum, put before the line's text, so that no line
passes for one of another iteration. If a process dies inside a line, the next start first writes a newline, which ends it.

The system gets a line before the loop gets its batch: a killed process loses no line. A thread flushes lines to the disk once
a minute: a machine that goes down loses a minute at most. What cannot be written is lost, and the audit reports it.

begin     contents of a begin line
file      names of a ledger's files; appends by one process
recorder  the ledgers of one dataset, and the record of an iteration
"""
