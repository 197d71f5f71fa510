"""Early digests: of payloads whose body is still coming, so that their bytes are found in the processor's cache."""

from __future__ import annotations

from penstock.errors import PenstockError
from penstock.wire.digests import digest
from penstock.wire.frame import read_header
from penstock.wire.head import BIN32


class EarlyDigests:
    """The digests of a body's payloads, as far as its frames are laid out as the first.

    `found` has them by the byte at which a payload begins. What was looked at may not change any more.
    """

    def __init__(self) -> None:
        self.found: dict[int, str] = {}
        self._at = 0  # where the payload begins that comes next
        self._nbytes = self._stride = 0
        self._mark = b""  # that stands before a payload of this length

    def look(self, received: memoryview) -> None:
        """Makes those of the payloads that are complete in what has come so far. Holds nothing of it."""
        if not self._stride:
            try:
                header, self._at = read_header(received, 0)
            except PenstockError:  # it has not come, or is none: that is for `decode` to tell
                return
            self._nbytes = header.layout.nbytes
            self._stride = self._at + self._nbytes
            self._mark = bytes(received[self._at - BIN32.size : self._at])
        while (end := self._at + self._nbytes) <= len(received) and received[self._at - BIN32.size : self._at] == self._mark:
            self.found[self._at] = digest(received[self._at : end])
            self._at += self._stride
