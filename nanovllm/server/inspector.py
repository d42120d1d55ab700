"""The inspector in a server: its page, the live events, and pause and step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from fastapi import APIRouter, HTTPException
from fastapi.responses import HTMLResponse, StreamingResponse
from pydantic import BaseModel, Field

from nanovllm.inspector import page
from nanovllm.inspector.live import MAX_STEPS, Live, NobodyWatches


class Control(BaseModel):
    """What a page asks of the engine."""

    action: Literal["pause", "resume", "step"]
    steps: int = Field(default=1, ge=1, le=MAX_STEPS)


def inspector_router(live: Live, dependencies: Sequence[Any] = ()) -> APIRouter:
    """GET /inspector, GET /inspector/events (server-sent events), POST /inspector/control.

    The routes are not part of the OpenAPI schema: one of them never ends.

    Args:
        live: of the server's AsyncLLM; close() it when the server stops, else open pages hold its end up.
        dependencies: FastAPI's, such as a check of the API key. They guard events and control, which show and stop what
            others run; the page itself tells nothing.
    """
    router = APIRouter(include_in_schema=False)

    @router.get("/inspector")
    async def show() -> HTMLResponse:
        headers = {"Content-Security-Policy": page.CONTENT_SECURITY_POLICY, "Cache-Control": "no-cache"}
        return HTMLResponse(page.html(), headers=headers)

    @router.get("/inspector/events", dependencies=[*dependencies])
    async def events() -> StreamingResponse:
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        return StreamingResponse(live.events(), media_type="text/event-stream", headers=headers)

    @router.post("/inspector/control", dependencies=[*dependencies])
    async def control(body: Control) -> dict[str, bool]:
        try:
            return {"paused": await live.control(body.action, body.steps)}
        except NobodyWatches as e:
            raise HTTPException(409, str(e)) from None
        except RuntimeError as e:
            raise HTTPException(503, str(e)) from None

    return router
