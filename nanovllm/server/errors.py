"""Errors in OpenAI's form, with the status that its clients expect."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from nanovllm.async_llm import EngineStopped

logger = logging.getLogger("nanovllm.server")
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    413: "invalid_request_error",
    429: "rate_limit_error",
    500: "internal_error",
    503: "service_unavailable_error",
    504: "timeout_error",
}


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorResponse(BaseModel):
    """The body of every answer with a status of 400 or more."""

    error: ErrorDetail


class ApiError(HTTPException):
    """An error to be answered with `status`; param names the field of the request that it is about."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        headers: dict[str, str] | None = None,
    ) -> None:
        super().__init__(status, message, headers)
        self.param, self.code = param, code

    def body(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status_code, "invalid_request_error")
        return {"error": {"message": self.detail, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.body(), self.status_code, self.headers)


def api_error(error: BaseException) -> ApiError:
    """What an exception of the engine's side means to a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, (ValueError, TypeError)):
        return ApiError(400, str(error))
    if isinstance(error, TimeoutError):
        return ApiError(504, str(error), code="timeout")
    if isinstance(error, EngineStopped):
        return ApiError(503, str(error), code="engine_unavailable")
    logger.error("request failed", exc_info=error)
    return ApiError(500, str(error) if isinstance(error, RuntimeError) else f"internal error: {type(error).__name__}")


def _where(location: Sequence[Any]) -> str | None:
    """("body", "messages", 0, "role") to "messages[0].role", without the names of a union's branches."""
    text = ""
    for part in location[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif part.isidentifier() and part not in ("str", "int") and not part.endswith("Request"):
            text += f".{part}" if text else part
    return text or None


def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        return ApiError(
            400, f"body: expected JSON, got an error at byte {first['loc'][-1]}: {first['ctx']['error']}"
        ).response()
    if tuple(first["loc"]) == ("body",) and first["type"] in ("model_attributes_type", "model_type", "dict_type"):
        return ApiError(400, "body: expected a JSON object, sent as Content-Type: application/json").response()
    # All branches of a union complain. What the client meant is the one that has the right type, and the deepest.
    deepest = max(problems, key=lambda p: (not p["type"].endswith("_type"), len(p["loc"])))
    param = _where(deepest["loc"])
    message = str(deepest["msg"]).removeprefix("Value error, ")
    return ApiError(400, f"{param}: {message}" if param else message, param).response()


def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    message, status = str(error.detail), error.status_code
    if status == 404:
        message = f"no such path: {request.url.path}"
    if status == 405:
        message = f"{request.url.path}: method {request.method} is not allowed"
    return ApiError(status, message, headers=dict(error.headers or {})).response()


def _on_any(request: Request, error: Exception) -> JSONResponse:
    return api_error(error).response()


def add_error_handlers(app: FastAPI) -> None:
    """Every error of the app in OpenAI's form."""
    app.add_exception_handler(RequestValidationError, _on_invalid)
    app.add_exception_handler(HTTPException, _on_http)
    app.add_exception_handler(Exception, _on_any)
