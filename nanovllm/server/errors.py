"""Errors in OpenAI's form, with the status that its clients expect."""

from __future__ import annotations

import logging
import sys
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException

from nanovllm.async_llm import EngineStopped
from nanovllm.server.problems import explain

logger = logging.getLogger("nanovllm.server")
_TYPES = {
    401: "authentication_error",
    404: "not_found_error",
    408: "timeout_error",
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


def _on_invalid(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError)
    problems = error.errors()
    first = problems[0]
    if first["type"] == "json_invalid":
        text = f"body: expected JSON, got an error at character {first['loc'][-1]}: {first['ctx']['error']}"
        return ApiError(400, text).response()
    if isinstance(first["input"], bytes):  # FastAPI reads no JSON out of a body that does not say it is some
        got = request.headers.get("content-type", "none")
        return ApiError(400, f"body: expected Content-Type: application/json, got {got}").response()
    message, param = explain(problems)
    return ApiError(400, message, param).response()


def _unreadable(cause: BaseException | None) -> str | None:
    """Why FastAPI could not read a body; None: for another reason."""
    if isinstance(cause, UnicodeDecodeError):
        return f"body: expected JSON in UTF-8, got byte 0x{cause.object[cause.start]:02x} at byte {cause.start}"
    if isinstance(cause, RecursionError):
        return "body: expected JSON, got one nested too deeply"
    if isinstance(cause, ValueError):
        return f"body: expected numbers of at most {sys.get_int_max_str_digits()} digits, got a longer one"
    return None


def _on_http(request: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, HTTPException)
    if isinstance(error, ApiError):
        return error.response()
    message, status = _unreadable(error.__cause__) or str(error.detail), error.status_code
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
    app.add_exception_handler(EngineStopped, _on_any)
    app.add_exception_handler(Exception, _on_any)  # of what is handled here, Starlette logs the traceback
