"""HTTP answers of generations: plain JSON or server-sent events, ended when the client leaves or time is up."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from json.encoder import encode_basestring
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from nanovllm.server.errors import api_error
from nanovllm.server.generation import Generation

DONE = b"data: [DONE]\n\n"
_PATIENCE = 5.0  # seconds that a client has to take in the news that time is up


def quoted(text: str) -> bytes:
    """text as a JSON string."""
    return encode_basestring(text).encode()


def event(data: dict[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + to_json(data) + b"\n\n"


def to_json(data: Any) -> bytes:
    return json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode()


class Answer(Response):
    """Sends what `chunks` yields: for a stream each chunk at once, else the one chunk, which is the whole.

    The status waits for the first chunk, so that what fails before it has the right one; later errors of a stream are
    its last event. Leaving early ends the generation.

    Args:
        timeout: seconds for all of it; 0: no limit.
    """

    def __init__(self, generation: Generation, chunks: AsyncGenerator[bytes], is_stream: bool, timeout: float) -> None:
        self._generation, self._chunks, self._is_stream, self._timeout = generation, chunks, is_stream, timeout
        self._is_expired = False
        super().__init__(None, media_type="text/event-stream" if is_stream else "application/json")
        self.raw_headers = [(k, v) for k, v in self.raw_headers if k != b"content-length"]
        if is_stream:
            self.headers["cache-control"] = "no-cache"
            self.headers["x-accel-buffering"] = "no"  # nginx

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        loop = asyncio.get_running_loop()
        # In a task of its own, waking up for a token does not pass through all of the frameworks' frames.
        sender = loop.create_task(self._send(scope, receive, send))
        watcher = loop.create_task(self._watch(receive))
        timers = []
        if self._timeout:
            timers = [
                loop.call_later(self._timeout, self._expire),
                loop.call_later(self._timeout + _PATIENCE, sender.cancel),
            ]
        try:
            await sender
        except asyncio.CancelledError:
            sender.cancel()
            if not self._is_expired:
                raise  # else a client that takes nothing in: the connection is closed
        finally:
            for timer in timers:
                timer.cancel()
            watcher.cancel()
            self._generation.close()
            await self._chunks.aclose()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        is_started, is_stream = False, self._is_stream
        try:
            async for chunk in self._chunks:
                if not is_started:
                    is_started = True
                    await self._start(send, chunk)
                await send({"type": "http.response.body", "body": chunk, "more_body": is_stream})
            if is_stream:
                await send({"type": "http.response.body", "body": b"", "more_body": False})
        except Exception as e:
            error = api_error(e)
            if not is_started:
                await error.response()(scope, receive, send)
            else:
                await send({"type": "http.response.body", "body": event(error.body()), "more_body": False})

    async def _start(self, send: Send, first: bytes) -> None:
        headers = self.raw_headers
        if not self._is_stream:
            headers = [*headers, (b"content-length", str(len(first)).encode())]
        await send({"type": "http.response.start", "status": 200, "headers": headers})

    def _expire(self) -> None:
        self._is_expired = True
        error = TimeoutError(f"the request took longer than {self._timeout:g} seconds")
        self._generation.stream.close(error)

    async def _watch(self, receive: Receive) -> None:
        """Ends the generation when the client has gone."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self._generation.stream.close()
