"""GETs that any of several servers may answer, with bodies received into reused memory.

transport    a GET, tried on all servers until one answers, all refuse, or the deadline passes
servers      choice of the next server, and return to the home server
retry_log    log lines while a run waits
connection   one GET to one server; `probe` sends requests outside of a run
responses    the exception for a response without a batch
receive      bodies, from the socket into `buffers`; `channel` is an HTTP/1.1 connection
"""
