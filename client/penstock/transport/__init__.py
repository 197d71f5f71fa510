"""One GET, answered by any of several servers, with its body received into memory that is used again.

transport    a GET that is tried over all servers until one answers, all refuse, or time is up
servers      which server is asked next, and when the home server is asked again
retry_log    log lines while a run waits
connection   one GET of one server; `probe` asks for what is not part of a run
responses    the exception that a response without a batch stands for
receive      bodies, from the socket into `buffers`; `channel` is a connection that speaks HTTP/1.1
"""
