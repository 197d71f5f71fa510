"""Serving: a process, or several, that answer at one port until they are told to stop.

serve      one process with its catalog
processes  several of them, started and watched by one that serves nothing
listening  the socket; `accepting` shares its connections among processes
heads      cuts off a request whose head does not end
stalled    cuts off a reader that takes nothing
"""
