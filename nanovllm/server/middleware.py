"""What every request passes before the app: its key and its size. Plain ASGI, so that streams cost nothing."""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from nanovllm.server.errors import ApiError

# Probes and scrapers bring no key, and browsers none for a page: the inspector's asks for it.
_OPEN_PATHS = ("/health", "/metrics", "/inspector")


def _is_open(scope: Scope) -> bool:
    return scope["path"].removeprefix(scope.get("root_path", "")) in _OPEN_PATHS  # some proxies keep the prefix


class ApiKeyMiddleware:
    """Refuses requests without one of the keys; those of CORS preflight and of the open paths pass."""

    def __init__(self, app: ASGIApp, api_keys: tuple[str, ...]) -> None:
        self.app = app
        self._keys = [key.encode() for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] != "OPTIONS" and not _is_open(scope):
            given = dict(scope["headers"]).get(b"authorization", b"")
            scheme, _, key = given.partition(b" ")
            matches = [hmac.compare_digest(key.strip(), k) for k in self._keys]
            if scheme.lower() != b"bearer" or not any(matches):
                text = "expected one of the server's keys in the header `Authorization: Bearer KEY`"
                text += ", got none" if not given else ", got another one"
                error = ApiError(401, text, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
                await error.response()(scope, receive, send)
                return
        await self.app(scope, receive, send)


class BodyLimitMiddleware:
    """Refuses bodies of more than max_bytes: by their content-length, else when that much has arrived."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self.app, self._max_bytes = app, max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        length = dict(scope["headers"]).get(b"content-length", b"")
        if length.isdigit() and int(length) > self._max_bytes:
            await self._error(int(length)).response()(scope, receive, send)
            return
        num_bytes = 0

        async def counted() -> Message:
            nonlocal num_bytes
            message = await receive()
            if message["type"] == "http.request":
                num_bytes += len(message.get("body", b""))
                if num_bytes > self._max_bytes:
                    raise self._error(num_bytes)
            return message

        await self.app(scope, counted, send)

    def _error(self, num_bytes: int) -> ApiError:
        # The rest of the body is never read: the connection cannot serve another request.
        text = f"body: expected at most {self._max_bytes} bytes, got {num_bytes} or more"
        return ApiError(413, text, code="body_too_large", headers={"Connection": "close"})
