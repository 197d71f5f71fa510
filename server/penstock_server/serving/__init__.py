"""Serving: one or several processes on one port, until a stop signal."""
