"""What the server answers, for its OpenAPI description; the answers themselves are written by hand, for speed."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import BaseModel

from nanovllm.server.errors import ErrorResponse


class PromptTokensDetails(BaseModel):
    cached_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None


class Completion(BaseModel):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


class AssistantMessage(BaseModel):
    role: Literal["assistant"]
    content: str | None
    reasoning_content: str | None = None
    tool_calls: list[dict[str, Any]] | None = None


class ChatChoice(BaseModel):
    index: int
    message: AssistantMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    stop_reason: str | int | None


class ChatCompletion(BaseModel):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Model(BaseModel):
    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "nanovllm"
    root: str
    parent: str | None = None
    max_model_len: int


class ModelList(BaseModel):
    object: Literal["list"] = "list"
    data: list[Model]


class Tokens(BaseModel):
    count: int
    max_model_len: int
    tokens: list[int]
    token_strs: list[str] | None = None


class Text(BaseModel):
    prompt: str


class Version(BaseModel):
    version: str


class Health(BaseModel):
    status: Literal["ok"] = "ok"


_TEXTS = {
    400: "The request cannot be served as it is",
    401: "No valid API key",
    404: "No such model",
    413: "The body is too large",
    429: "The queue is full",
    500: "The request failed",
    503: "The engine cannot serve requests",
    504: "The request took too long",
}


def errors(*statuses: int) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that may answer with these."""
    return {status: {"model": ErrorResponse, "description": _TEXTS[status]} for status in statuses}


def generations(model: type[BaseModel]) -> dict[int | str, dict[str, Any]]:
    """The `responses` of a route that generates: `model`, or events."""
    event = {"type": "object", "properties": {"data": {"type": "string"}}, "required": ["data"]}
    events = {"text/event-stream": {"schema": event}}
    text = "The whole answer, or with stream=true its pieces as server-sent events"
    ok: dict[int | str, dict[str, Any]] = {200: {"model": model, "content": events, "description": text}}
    return ok | errors(400, 401, 404, 413, 429, 500, 503, 504)
