"""Channel: one HTTP/1.1 connection, limited to GETs and their responses.

A trainer's CPU spends most of its time for data on bodies of megabytes, and each evicts Python's memory from the CPU cache.
With a cold cache, http.client takes half a millisecond for the few lines around a body, and reads a body in 25 pieces.
"""

from __future__ import annotations

import errno
import re
import select
import socket
import struct
import sys
from collections.abc import Iterator, Mapping
from http import HTTPStatus
from typing import NamedTuple

_TICK_SECONDS = 1  # inside a body: a read then returns what it has, however little
_SEND_SECONDS = 60
_PIECE_BYTES = 1 << 12  # per read of lines: heads are mostly shorter, and body bytes in it are copied again
_MAX_HEAD = 1 << 16
_MAX_LINE = 1 << 12
_CHUNK_BYTES = 1 << 18
_BEGINNING = b"HTTP/1."
_STATUS = re.compile(r"HTTP/1\.([0-9]) ([1-9][0-9][0-9])(?: .*)?")
_LENGTH = re.compile(r"[0-9]{1,100}")
_CHUNK_SIZE = re.compile(rb"0*([0-9A-Fa-f]{1,15})[ \t]*(?:;.*)?")
_LINE_END = re.compile(rb"\r?\n")  # some servers send a bare LF
_HEAD_END = re.compile(rb"\r?\n\r?\n")
_FOLD = re.compile(r"\r?\n[ \t]+")
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f]")
_WITHOUT_BODY = (204, 304)
_LOST = (errno.ETIMEDOUT, errno.EHOSTUNREACH, errno.ENETUNREACH)  # the kernel found the peer unreachable


class HttpError(Exception):
    """Invalid or incomplete response."""


class Head(NamedTuple):
    """Status line and headers of a response. `length` is the body's bytes; None (unknown) for a chunked body.

    headers  by lowercase name
    is_last  the server closes the connection after this response
    """

    status: int
    headers: Mapping[str, str]
    length: int | None
    is_last: bool


class Channel:
    """Connection to a server: requests and responses, one after the other. For one thread at a time.

    Its methods raise OSError if the connection fails: TimeoutError after `silence_seconds` without a byte.
    """

    def __init__(self, sock: socket.socket) -> None:
        self.silence_seconds = 60.0
        self._socket = sock
        self._before = b""  # bytes received after the lines read so far
        # On Linux the kernel can wait for megabytes. It cannot for TLS: it does not see the record bounds.
        self._waits_for_all = sys.platform == "linux" and type(sock) is socket.socket
        if self._waits_for_all:
            self._poll = select.poll()
            self._poll.register(sock, select.POLLIN)
            sock.settimeout(None)  # with a timeout, Python makes the socket non-blocking and reads come short
            for option, seconds in ((socket.SO_RCVTIMEO, _TICK_SECONDS), (socket.SO_SNDTIMEO, _SEND_SECONDS)):
                sock.setsockopt(socket.SOL_SOCKET, option, struct.pack("ll", seconds, 0))

    def send(self, request: bytes) -> None:
        """Send a whole request. Raises ConnectionError: the connection was lost before."""
        if self._before:  # these bytes would pass for the response
            raise ConnectionResetError("more came than was asked for")
        if not self._waits_for_all:
            self._socket.settimeout(_SEND_SECONDS)
        try:
            self._socket.sendall(request)
        except BlockingIOError:
            raise TimeoutError("timed out") from None
        except OSError as error:
            if error.errno in _LOST:
                raise ConnectionResetError(str(error)) from error
            raise

    def head(self) -> Head:
        """Read the head of the next response.

        Raises:
            HttpError: the response is not valid HTTP.
            ConnectionError: the connection ended before it, for example because the server has closed it.
        """
        self._before = self._before or self._some()
        if not self._before:
            raise ConnectionResetError("the server closed the connection without an answer")
        while True:
            head = _parse(self._upto(_HEAD_END, _MAX_HEAD, _BEGINNING).decode("latin-1"))
            # Any other 1xx status is interim: the response follows.
            if head.status >= 200 or head.status == HTTPStatus.SWITCHING_PROTOCOLS:
                return head

    def readinto(self, memory: memoryview) -> int:
        """Receive at most len(memory) bytes of a body; return their number, 0 at the end of the connection."""
        if self._before:
            some = self._before[: len(memory)]
            memory[: len(some)] = some
            self._before = self._before[len(some) :]
            return len(some)
        return self._receive(memory, all_of_it=True)

    def chunks(self) -> Iterator[bytes]:
        """Yield a chunked body in pieces. Raises HttpError: the body is truncated or malformed."""
        memory = memoryview(bytearray(_CHUNK_BYTES))
        while size := self._chunk_size():
            while size:
                count = self.readinto(memory[:size])
                if not count:
                    raise HttpError(f"the connection ended {size:,} bytes before the end of a chunk")
                size -= count
                yield bytes(memory[:count])
            if self._line():
                raise HttpError("the chunks of the answer are garbled")
        while self._line():  # trailer headers
            pass

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()

    def _chunk_size(self) -> int:
        found = _CHUNK_SIZE.fullmatch(self._line())
        if not found:
            raise HttpError("the chunks of the answer are garbled")
        return int(found[1], 16)

    def _line(self) -> bytes:
        return self._upto(_LINE_END, _MAX_LINE)

    def _upto(self, end: re.Pattern[bytes], most: int, beginning: bytes = b"") -> bytes:
        """Read up to the match of `end`; return the bytes before it."""
        came = self._before
        while not (found := end.search(came)) or not came.startswith(beginning):
            if not beginning.startswith(came[: len(beginning)]):
                raise HttpError("what came is no HTTP")  # raise at once: another protocol may wait for us and send no more
            if len(came) > most:
                raise HttpError(f"the answer has more than {most:,} bytes of lines without an end")
            some = self._some()
            if not some:
                raise HttpError("the connection ended in mid-answer")
            came += some
        self._before = came[found.end() :]
        return came[: found.start()]

    def _some(self) -> bytes:
        piece = bytearray(_PIECE_BYTES)
        return bytes(piece[: self._receive(memoryview(piece))])

    def _receive(self, memory: memoryview, *, all_of_it: bool = False) -> int:
        if not self._waits_for_all:
            self._socket.settimeout(self.silence_seconds)
            return self._socket.recv_into(memory)
        # Do not rely on the kernel's receive timeout: Python restarts it after each signal.
        if not self._poll.poll(self.silence_seconds * 1000):
            raise TimeoutError("timed out")
        return self._socket.recv_into(memory, 0, socket.MSG_WAITALL if all_of_it else 0)


def _parse(text: str) -> Head:
    first, *lines = _FOLD.sub(" ", text).replace("\r\n", "\n").split("\n")
    status_line = _STATUS.fullmatch(first)
    if not status_line:
        raise HttpError("what came is no HTTP")
    headers: dict[str, str] = {}
    for line in lines:
        name, colon, value = line.partition(":")
        if not colon or " " in name or _CONTROL.search(line):
            raise HttpError("the headers of the answer are garbled")
        name, value = name.lower(), value.strip()
        headers[name] = f"{headers[name]}, {value}" if name in headers else value
    status, connection = int(status_line[2]), headers.get("connection", "").lower()
    is_last = "keep-alive" not in connection if status_line[1] == "0" else "close" in connection
    return Head(status, headers, _length_of(status, headers), is_last)


def _length_of(status: int, headers: Mapping[str, str]) -> int | None:
    if status < 200 or status in _WITHOUT_BODY:
        return 0
    if coding := headers.get("transfer-encoding"):
        if coding.lower() != "chunked":
            raise HttpError(f"the answer is packed with {coding[:40]}, which was not asked for")
        return None
    length = headers.get("content-length", "")
    if not _LENGTH.fullmatch(length):
        raise HttpError(f"the answer, of status {status}, does not tell its length")
    return int(length)
