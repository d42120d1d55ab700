"""HTTP connections with bounds: on the head of a request, and on the time that a client may take to send one."""

from __future__ import annotations

import asyncio
from http import HTTPStatus
from typing import Any

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from nanovllm.server.errors import ApiError

MAX_HEAD_BYTES = 64 << 10  # of the request line and the headers, beyond the first piece that arrives of them


class Connection(HttpToolsProtocol):
    """uvicorn's connection, which by itself keeps heads of any size and waits for the rest of a request without end.

    Args:
        read_timeout: seconds that a client has for a head, and for each next piece of a body; 0: no limit.
    """

    def __init__(self, *args: Any, read_timeout: float, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._read_timeout = read_timeout
        self._timer: asyncio.TimerHandle | None = None
        self._is_in_head = self._is_in_body = False
        self._head_bytes = 0

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._await_more()

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        was_in_head, was_in_body = self._is_in_head, self._is_in_body
        super().data_received(data)
        if self.transport.is_closing():
            return
        if was_in_head and self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > MAX_HEAD_BYTES:
                text = f"headers: expected at most {MAX_HEAD_BYTES} bytes, got more"
                self._refuse(ApiError(431, text, code="headers_too_large"))
                return
        if was_in_body or not self._is_waiting:  # a head has to be there in time as a whole
            self._stop_timer()
        if self._is_waiting:
            self._await_more()

    def send_400_response(self, msg: str) -> None:
        self._refuse(ApiError(400, "expected a request of HTTP/1.1, got one that cannot be read"))

    def shutdown(self) -> None:
        if self._is_in_head or self._is_in_body:  # what has not come yet would hold up the end
            self._refuse(ApiError(503, "the server is shutting down", code="engine_unavailable"))
        else:
            super().shutdown()

    # The parser's callbacks

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._is_in_head, self._head_bytes = True, 0

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._is_in_head, self._is_in_body = False, True

    def on_message_complete(self) -> None:
        super().on_message_complete()
        self._is_in_body = False

    # Waiting for the client

    @property
    def _is_waiting(self) -> bool:
        """Whether the client has to send something before the server can go on."""
        return self._is_in_body or self.cycle is None or self.cycle.response_complete

    def _await_more(self) -> None:
        if self._timer is None and self._read_timeout:
            self._timer = self.loop.call_later(self._read_timeout, self._expire)

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _expire(self) -> None:
        self._timer = None
        if self._is_in_head or self._is_in_body:
            text = f"expected the rest of the request within {self._read_timeout:g} seconds, got no more"
            self._refuse(ApiError(408, text, code="timeout"))
        elif self.cycle is None:  # else it is idle, and its keep-alive timer runs
            self.transport.close()

    def _refuse(self, error: ApiError) -> None:
        """Ends the connection, with an answer where none has begun."""
        if self.transport.is_closing():
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            body = bytes(error.response().body)
            head = f"HTTP/1.1 {error.status_code} {HTTPStatus(error.status_code).phrase}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
            self.transport.write(head.encode() + body)
        self.transport.close()
