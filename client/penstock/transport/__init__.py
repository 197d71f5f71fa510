"""The network: one GET, answered by any of several servers, and its body received into memory that is used again.

transport   the way in: a GET that is tried over all servers until one answers, all refuse, or time is up
servers     whose turn it is; `trial` tells when the first one can be had again
retry_log   what is said meanwhile
connection  one GET of one server; `aside` asks for what is no part of a run, `watch` tells a slow server from one that hangs
answers     what an answer that is no batch means
receive     bodies, from the socket straight into `buffers`; `channel` is a connection that speaks HTTP/1.1
"""
