"""Request heads: limits their size. uvicorn has no limit, and one connection could take all memory."""

from __future__ import annotations

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

_MAX_BYTES = 1 << 17  # a URL may have half of it; bytes received with the end of the previous head or body do not count


class BoundedHeads(HttpToolsProtocol):
    """A protocol that refuses heads, and data after a body, of more than `_MAX_BYTES`."""

    _num_taken = 0  # bytes since the last complete head or piece of a body

    def data_received(self, data: bytes) -> None:
        """Receives bytes from the client."""
        self._num_taken += len(data)
        super().data_received(data)
        if self._num_taken <= _MAX_BYTES or self.transport.is_closing():
            return
        if self.cycle and not self.cycle.response_complete:
            self.transport.abort()  # a response is in progress
        else:
            self.send_400_response(f"The head of this request has more than {_MAX_BYTES:,} bytes.")

    def on_headers_complete(self) -> None:
        """Resets the count after a complete head."""
        self._num_taken = 0
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Resets the count after a piece of a body."""
        self._num_taken = 0
        super().on_body(body)
