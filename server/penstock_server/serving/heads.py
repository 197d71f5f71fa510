"""Heads of requests: one that does not end is cut off. uvicorn takes any, and a single connection could take all memory."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_BYTES = 1 << 17  # a URL may have half of that; what comes in one piece with the end of what was before is not counted


class BoundedHeads(HttpToolsProtocol):
    """Refuses heads of requests, and what stands behind a body, of more than so many bytes."""

    _num_taken = 0  # since the last head, or piece of a body, that was whole

    def data_received(self, data: bytes) -> None:
        """Takes what a client sent."""
        self._num_taken += len(data)
        super().data_received(data)
        if self._num_taken <= _MAX_BYTES or self.transport.is_closing():
            return
        if self.cycle and not self.cycle.response_complete:
            self.transport.abort()  # an answer is under way
        else:
            self.send_400_response(f"The head of this request has more than {_MAX_BYTES:,} bytes.")

    def on_headers_complete(self) -> None:
        """A head is whole."""
        self._num_taken = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """A piece of a body is there."""
        self._num_taken = 0
        super().on_body(body)
