"""A POST whose answer is read as server-sent events, with the time of each; small, to load a server from one core."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncIterator
from typing import Any
from urllib.parse import urlsplit

_LIMIT = 1 << 20  # bytes of one line


class HttpError(Exception):
    """An answer with another status than 200."""

    def __init__(self, status: int, body: str) -> None:
        super().__init__(f"status {status}: {body}")
        self.status = status


class Endpoint:
    """Where requests go.

    Args:
        base_url: http://host:port/v1 or https://...; api_key: sent as a bearer token where given.
    Raises:
        ValueError: the URL has no http or https scheme, or no host.
    """

    def __init__(self, base_url: str, api_key: str | None = None) -> None:
        url = urlsplit(base_url if "://" in base_url else f"http://{base_url}")
        if url.scheme not in ("http", "https") or not url.hostname:
            raise ValueError(f"base_url: expected http://host:port/v1 or https://..., got {base_url!r}")
        self._host, self._port = url.hostname, url.port or (443 if url.scheme == "https" else 80)
        self._tls = ssl.create_default_context() if url.scheme == "https" else None
        self._path = url.path.rstrip("/")
        self._headers = f"Host: {url.netloc}\r\nAccept: */*\r\nConnection: close\r\n"
        if api_key is not None:
            self._headers += f"Authorization: Bearer {api_key}\r\n"

    async def get_json(self, path: str) -> Any:
        """The object at a path. Raises HttpError, OSError."""
        return json.loads(b"".join([chunk async for chunk in self._request("GET", path, b"")]))

    async def events(self, path: str, body: dict[str, Any]) -> AsyncIterator[tuple[float, list[bytes]]]:
        """(time.perf_counter(), data of the events that came then). Raises HttpError, OSError."""
        rest = b""
        async for chunk in self._request("POST", path, json.dumps(body).encode()):
            now = time.perf_counter()
            *whole, rest = (rest + chunk).replace(b"\r\n", b"\n").split(b"\n\n")
            data = [block[6:] for block in whole if block.startswith(b"data: ")]
            if data:
                yield now, data

    async def _request(self, method: str, path: str, body: bytes) -> AsyncIterator[bytes]:
        """Pieces of the answer's body, as they come."""
        reader, writer = await asyncio.open_connection(self._host, self._port, ssl=self._tls, limit=_LIMIT)
        try:
            head = f"{method} {self._path}{path} HTTP/1.1\r\n{self._headers}"
            if body:
                head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n"
            writer.write(head.encode() + b"\r\n" + body)
            status_line, *lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").strip().split("\r\n")
            headers = {name.lower(): value.strip() for name, _, value in (line.partition(":") for line in lines)}
            pieces = _chunks(reader) if headers.get("transfer-encoding", "").lower() == "chunked" else _rest(reader)
            status = int(status_line.split()[1])
            if status != 200:
                raise HttpError(status, b"".join([p async for p in pieces]).decode(errors="replace")[:500])
            async for piece in pieces:
                yield piece
        except asyncio.IncompleteReadError as e:
            raise ConnectionError("the server closed the connection early") from e
        except (asyncio.LimitOverrunError, IndexError, ValueError) as e:
            raise ConnectionError(f"the server does not speak HTTP/1.1: {e}") from e
        finally:
            writer.close()


async def _chunks(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while size := int((await reader.readuntil(b"\r\n")).split(b";")[0], 16):
        yield (await reader.readexactly(size + 2))[:-2]


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    while piece := await reader.read(1 << 16):
        yield piece
