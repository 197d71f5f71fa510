"""Serving: one or several processes on one port, until a stop signal.

listener   binds the socket that all processes share
server     one process with its catalog
workers    several processes, started and replaced by one that does not serve
"""
