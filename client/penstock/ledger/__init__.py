"""The ledger: a line for every batch that a training loop was handed, so that `penstock audit` can prove what a run saw.

Each process has a file of its own, and every start of the run appends to it. It is text, to be read and searched:

    begin {"ledger": 3, "launch": "5f0c77aa", ..., "epoch": 0, "step": 0, "spec": {...}} 1c9a0d1f
                   0 9f3c0d11a2b4c5d6 8c0d1f22
                   1 77aa0d11a2b4c5d6 09e3b7aa
    end 5b1e2c3d

begin    an iteration over the dataset begins, or goes on after lines of another; the fields are those of Begin
a step   the batch of this step was handed to the loop: the step in 16 columns, the batch's digest in 16 hex digits
end      the epoch was over: the loop asked for another batch

The last word of a line is its check in 8 hex digits: the CRC-32 of the text before it, without the space between them. Behind
a begin line, the check of that line is put before each line's own text, so that no line passes for one of another iteration.
A line that was cut off when its process died is closed by the newline with which the next start begins.

A line is given to the system before its batch is given to the loop: a process that is killed loses none. A thread has the disk
write them once a minute: a machine that goes down loses a minute at most.

book     one dataset's ledgers, and how an iteration is recorded
begin    what a begin line says
file     a file as a process appends to it, whatever its disk does; lines, what waits to be written
held     which files the process has, each once for all of its iterations, and the locks around them
opening  how it is opened, and kept from other processes
names    which files are of one ledger
"""
