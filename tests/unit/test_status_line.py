"""The line that somebody who waits sees: as wide as their terminal, gone afterwards, and never in anybody's way."""

from __future__ import annotations

import fcntl
import io
import os
import pty
import struct
import sys
import termios

import pytest

from penstock.display.status_line import StatusLine


def test_it_is_cut_to_the_terminal_and_cleared_where_it_was_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    reads, writes = pty.openpty()
    fcntl.ioctl(writes, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 10, 0, 0))
    with os.fdopen(writes, "w") as terminal:
        monkeypatch.setattr(sys, "stderr", terminal)
        with StatusLine() as status:
            status.draw("0123456789 and more")
            monkeypatch.setattr(sys, "stderr", other := io.StringIO())
        expected = b"\r012345678\x1b[K\r\x1b[K"
        seen = b""
        while len(seen) < len(expected):  # a read may give the line alone
            seen += os.read(reads, 1000)
        assert seen == expected
        assert other.getvalue() == ""
        monkeypatch.setattr(sys, "stderr", terminal)
        monkeypatch.setenv("TERM", "dumb")  # it would show what clears a line
        assert not StatusLine().is_seen
    os.close(reads)


def test_a_process_without_a_stderr_draws_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream in (None, closed, io.StringIO(), object()):
        monkeypatch.setattr(sys, "stderr", stream)
        with StatusLine() as status:
            assert not status.is_seen
            status.draw("fox")
