"""Answers about the server itself, and about a request that fails."""

from __future__ import annotations

from typing import NotRequired

from typing_extensions import TypedDict

from penstock_server.schemas import described


@described
class HealthAnswer(TypedDict):
    """A process that is alive."""

    status: str
    """ok"""
    version: str
    """of the server"""
    wire: int
    """of the format of frames"""
    time: float
    """the clock, in seconds since 1970"""


@described
class ReadyAnswer(TypedDict):
    """A server that serves."""

    status: str
    """ready"""
    datasets: int
    """how many are served"""
    refused: int
    """how many cannot be"""


@described
class ProblemAnswer(TypedDict):
    """Why there is no answer (RFC 9457)."""

    type: str
    """the kind of problem, a name for programs"""
    title: str
    """the kind of problem, in words"""
    status: int
    """the HTTP status"""
    detail: str
    """what happened, what follows and what to do"""
    instance: str
    """the path that was asked for"""
    done: NotRequired[int]
    """blocks that are counted, where a count is waited for"""
    total: NotRequired[int]
    """blocks to count, likewise"""
