"""A request's fields to SamplingParams."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams
from nanovllm.server.errors import ApiError
from nanovllm.server.protocol import ChatRequest, CompletionRequest, SamplingRequest
from nanovllm.server.tools import required_schema

_SAME_NAME = (
    "temperature",
    "top_p",
    "n",
    "stop",
    "seed",
    "presence_penalty",
    "frequency_penalty",
    "top_k",
    "min_p",
    "min_tokens",
    "ignore_eos",
    "stop_token_ids",
    "repetition_penalty",
    "skip_special_tokens",
)
_MAX_DIGITS = 20  # of a token id; int() refuses thousands of them
_COMPLETION_MAX_TOKENS = 16  # OpenAI's default
_GUIDED = {"guided_json": "json", "guided_regex": "regex", "guided_choice": "choice", "guided_grammar": "grammar"}


def sampling_params(
    request: CompletionRequest | ChatRequest, defaults: SamplingParams, room: int, tools: list[dict[str, Any]]
) -> SamplingParams:
    """The request's parameters over the model's defaults.

    Args:
        room: tokens that the context has left, what a chat may use without max_completion_tokens.
        tools: the functions of the request that may be called.
    Raises:
        ApiError: a field is out of range; it names the field.
    """
    values: dict[str, Any] = {n: v for n in _SAME_NAME if (v := getattr(request, n)) is not None}
    values["max_tokens"] = _max_tokens(request, room)
    if request.logit_bias:
        values["logit_bias"] = _logit_bias(request.logit_bias)
    if isinstance(request, ChatRequest):
        if request.logprobs:
            values["logprobs"] = request.top_logprobs or 0
        elif request.top_logprobs:
            raise ApiError(400, "top_logprobs: expected logprobs to be true, got false", "top_logprobs")
    elif request.logprobs is not None:
        values["logprobs"] = request.logprobs
    if isinstance(request.stop, list) and not request.stop:
        del values["stop"]
    try:
        form = structured_outputs(request, tools)
        return dataclasses.replace(defaults, **values, structured_outputs=form)
    except ValueError as e:
        raise parameter_error(e) from None


def parameter_error(error: ValueError | TypeError) -> ApiError:
    """What the engine says of a parameter, under the name that it has in a request."""
    text = re.sub("^StructuredOutputsParams", "structured_outputs", str(error).removeprefix("SamplingParams."))
    name = re.match(r"\w+(?=[.:])", text)
    return ApiError(400, text, name[0] if name else None)


def _max_tokens(request: CompletionRequest | ChatRequest, room: int) -> int:
    if isinstance(request, CompletionRequest):
        return request.max_tokens or max(_COMPLETION_MAX_TOKENS, request.min_tokens or 0)
    return request.max_completion_tokens or request.max_tokens or max(room, request.min_tokens or 0)


def _logit_bias(given: dict[str, float]) -> dict[int, float]:
    for key in given:
        if not key.isascii() or not key.isdigit() or len(key) > _MAX_DIGITS:
            got = repr(key) if len(key) <= 60 else f"{key[:60]!r}... of {len(key)} characters"
            raise ApiError(400, f"logit_bias: expected token ids as keys, got {got}", "logit_bias")
    return {int(key): bias for key, bias in given.items()}


def may_have_form(request: SamplingRequest) -> bool:
    """Whether structured_outputs may find one: told at once, without looking at what was asked for."""
    names = ("structured_outputs", "response_format", *_GUIDED)
    if any(getattr(request, name) is not None for name in names):
        return True
    return isinstance(request, ChatRequest) and request.tool_choice not in (None, "auto", "none")


def structured_outputs(request: SamplingRequest, tools: list[dict[str, Any]]) -> StructuredOutputsParams | None:
    """The form of the answer that the request asks for, in OpenAI's way, vLLM's, vLLM's older one, or by tool_choice.

    Raises:
        ApiError: it asks for several. ValueError: as StructuredOutputsParams.
    """
    forms: dict[str, StructuredOutputsParams] = {}
    if request.structured_outputs is not None:
        given = request.structured_outputs.model_dump(by_alias=True, exclude_none=True)
        if given and given != {"json_object": False}:
            forms["structured_outputs"] = StructuredOutputsParams(**given)
    for name, kind in _GUIDED.items():
        if (value := getattr(request, name)) is not None:
            forms[name] = StructuredOutputsParams(**{kind: value})
    wanted = request.response_format
    if wanted is not None and wanted.type == "json_object":
        forms["response_format"] = StructuredOutputsParams(json_object=True)
    elif wanted is not None and wanted.json_schema is not None and wanted.type == "json_schema":
        forms["response_format"] = StructuredOutputsParams(json=wanted.json_schema.schema_)
    if isinstance(request, ChatRequest) and (schema := _tool_schema(request, tools)) is not None:
        forms["tool_choice"] = StructuredOutputsParams(json=schema)
    if len(forms) > 1:
        raise ApiError(400, f"expected one form of the answer, got {' and '.join(forms)}", list(forms)[-1])
    return next(iter(forms.values()), None)


def _tool_schema(request: ChatRequest, tools: list[dict[str, Any]]) -> dict[str, Any] | None:
    if request.named_function is not None:
        return next(t for t in tools if t["name"] == request.named_function).get("parameters") or {"type": "object"}
    if request.tool_choice == "required":
        try:
            return required_schema(tools, request.parallel_tool_calls is not False)
        except ValueError as e:
            raise ApiError(400, str(e), "tools") from None
    return None
