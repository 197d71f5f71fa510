"""Simulation of large runs: ranks, replicas of the server, and an object store; see scaling.py beside this folder."""
