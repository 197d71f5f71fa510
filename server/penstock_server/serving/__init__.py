"""Serving: one or several processes on one port, until a stop signal.

serve      one process with its catalog
processes  several processes, started and supervised by one that does not serve
listening  the socket; `accepting` shares its connections among processes
heads      refuses a request whose head does not end
stalled    closes a connection whose client reads nothing
"""
