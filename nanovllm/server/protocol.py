"""What clients send: the fields of OpenAI's API that mean something here, and vLLM's additions."""

from __future__ import annotations

import json
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, model_validator
from pydantic.json_schema import SkipJsonSchema

from nanovllm.server.errors import ApiError
from nanovllm.server.problems import described
from nanovllm.server.prompts import Prompts, check_prompts

TOKEN_ID = "x-token-id"  # marks token ids in the OpenAPI description, for their bound


def _whole(value: Any) -> Any:
    """5.0 is an integer in JSON."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _biases(value: Any) -> Any:
    """Stops at the first bias that is no number."""
    for key, bias in value.items() if isinstance(value, dict) else ():
        if isinstance(bias, bool) or not isinstance(bias, (int, float)):
            raise ValueError(f"expected numbers as values, got {described(bias)} for {str(key)[:60]!r}")
    return value


# After the bounds of an int: before them, or at a field's `| None`, the OpenAPI description would lose the bounds.
WHOLE = BeforeValidator(_whole)
TokenId = Annotated[int, Field(ge=0, json_schema_extra={TOKEN_ID: True}), WHOLE]
Prompt = Annotated[str, Field(min_length=1)]
StopString = Annotated[str, Field(min_length=1)]
JsonObject = dict[str, Any]
_Items = TypeVar("_Items")
FirstBad = Annotated[_Items, Field(fail_fast=True)]  # a list that tells its first bad item only: it may have a million
_MAX_SEED = 2**63 - 1

# Fields of OpenAI's or vLLM's API that change the answer and do not exist here: a client must hear of it.
_UNSUPPORTED = (
    "suffix",
    "best_of",
    "use_beam_search",
    "length_penalty",
    "prompt_logprobs",
    "truncate_prompt_tokens",
    "allowed_token_ids",
    "bad_words",
    "logits_processors",
    "include_stop_str_in_output",
    "audio",
    "functions",
    "function_call",
    "prediction",
    "web_search_options",
    "chat_template",
    "documents",
    "continue_final_message",
)


class _Strict(BaseModel):
    """A "5" is no number, and a 1 no truth."""

    model_config = ConfigDict(strict=True)


class StreamOptions(_Strict):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class JsonSchemaFormat(_Strict):
    model_config = ConfigDict(strict=True, serialize_by_alias=True)

    name: str = "schema"
    description: str | None = None
    schema_: JsonObject = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(_Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None

    @model_validator(mode="after")
    def _has_schema(self) -> ResponseFormat:
        if self.type == "json_schema" and self.json_schema is None:
            raise ValueError('json_schema: expected {"name": ..., "schema": ...} for type "json_schema", got none')
        return self


class StructuredOutputs(_Strict):
    """vLLM's structured_outputs: at most one of these."""

    model_config = ConfigDict(strict=True, extra="forbid")

    json_: JsonObject | str | None = Field(None, alias="json")
    json_object: bool | None = None
    regex: str | None = None
    choice: Annotated[list[StopString], Field(min_length=1, fail_fast=True)] | None = None
    grammar: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_unknown(cls, data: Any) -> Any:
        names = ("json", "json_object", "regex", "choice", "grammar")
        for name in data if isinstance(data, dict) else ():
            if name not in names:  # only the first one
                raise ValueError(f"expected {', '.join(names)}, got {str(name)[:60]!r}")
        return data


class SamplingRequest(_Strict):
    """The fields of both kinds of completion."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    temperature: float | None = Field(None, ge=0, le=1e4)
    top_p: float | None = Field(None, gt=0, le=1)
    n: Annotated[int, Field(ge=1, le=128), WHOLE] | None = 1
    stop: StopString | Annotated[list[StopString], Field(max_length=64, fail_fast=True)] | None = None
    seed: Annotated[int, Field(ge=-_MAX_SEED, le=_MAX_SEED), WHOLE] | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    logit_bias: Annotated[dict[str, float], BeforeValidator(_biases)] | None = None
    user: str | None = None
    response_format: ResponseFormat | None = None
    # vLLM's
    top_k: Annotated[int, Field(ge=-1), WHOLE] | None = None
    min_p: float | None = Field(None, ge=0, le=1)
    min_tokens: Annotated[int, Field(ge=0), WHOLE] | None = None
    ignore_eos: bool | None = None
    stop_token_ids: FirstBad[list[TokenId]] | None = None
    repetition_penalty: float | None = Field(None, gt=0, le=1e4)
    skip_special_tokens: bool | None = None
    structured_outputs: StructuredOutputs | None = None
    # vLLM's older names of structured_outputs
    guided_json: SkipJsonSchema[JsonObject | str | None] = None
    guided_regex: SkipJsonSchema[str | None] = None
    guided_choice: SkipJsonSchema[FirstBad[list[str]] | None] = None
    guided_grammar: SkipJsonSchema[str | None] = None
    request_id: Annotated[str, Field(max_length=256)] | None = None  # in every event

    @model_validator(mode="before")
    @classmethod
    def _refuse_unsupported(cls, data: Any) -> Any:
        for name in _UNSUPPORTED if isinstance(data, dict) else ():
            if data.get(name) not in (None, False, [], "auto", "none") and not (name == "best_of" and data[name] == 1):
                got = json.dumps(data[name])[:80]
                raise ApiError(400, f"{name} is not supported by this server, got {got}", name)
        return data


# What check_prompts allows, for the OpenAPI description
_PromptSchema = (
    Prompt
    | Annotated[list[Prompt], Field(min_length=1)]
    | Annotated[list[TokenId], Field(min_length=1)]
    | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Field(min_length=1)]
)


class CompletionRequest(SamplingRequest):
    prompt: Annotated[Prompts, PlainValidator(check_prompts, json_schema_input_type=_PromptSchema)]
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    echo: bool | None = False
    add_special_tokens: bool = True


class ContentPart(_Strict):
    type: Literal["text", "input_text", "refusal"]
    text: str | None = None
    refusal: str | None = None


class FunctionCall(_Strict):
    name: str
    arguments: str | JsonObject = "{}"


class ToolCall(_Strict):
    id: str | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(_Strict):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | FirstBad[list[ContentPart]] | None = None
    name: str | None = None
    tool_calls: FirstBad[list[ToolCall]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _has_content(self) -> Message:
        if self.role == "user" and not self.text:
            raise ValueError("content: expected text in a message of role user, got none")
        return self

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text or part.refusal or "" for part in self.content)
        return self.content or ""

    def for_template(self) -> JsonObject:
        """The message as chat templates expect it: plain text, arguments as objects."""
        role = "system" if self.role == "developer" else self.role
        message: JsonObject = {"role": role, "content": self.text}
        for name in ("name", "tool_call_id", "reasoning_content"):
            if getattr(self, name) is not None:
                message[name] = getattr(self, name)
        if self.tool_calls:
            message["tool_calls"] = [
                {
                    "id": call.id,
                    "type": "function",
                    "function": {"name": call.function.name, "arguments": _as_object(call.function.arguments)},
                }
                for call in self.tool_calls
            ]
        return message


def _as_object(arguments: str | JsonObject) -> Any:
    if isinstance(arguments, dict):
        return arguments
    try:
        return json.loads(arguments or "{}")
    except RecursionError:
        raise ApiError(400, "messages: the arguments of a tool call are nested too deeply", "messages") from None
    except ValueError:
        return arguments


class FunctionDefinition(_Strict):
    name: str = Field(min_length=1)
    description: str | None = None
    parameters: JsonObject | None = None
    strict: bool | None = None


class Tool(_Strict):
    type: Literal["function"] = "function"
    function: FunctionDefinition


class NamedFunction(_Strict):
    name: str


class NamedToolChoice(_Strict):
    type: Literal["function"] = "function"
    function: NamedFunction


class ChatRequest(SamplingRequest):
    messages: FirstBad[list[Message]] = Field(min_length=1)
    max_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1), WHOLE] | None = None
    logprobs: bool | None = False
    top_logprobs: Annotated[int, Field(ge=0, le=20), WHOLE] | None = None
    tools: FirstBad[list[Tool]] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: JsonObject | None = None
    add_generation_prompt: bool = True
    reasoning_effort: str | None = None

    @property
    def named_function(self) -> str | None:
        return self.tool_choice.function.name if isinstance(self.tool_choice, NamedToolChoice) else None


class TokenizeTextRequest(_Strict):
    model: str | None = None
    prompt: str
    add_special_tokens: bool = True
    return_token_strs: bool | None = False


class TokenizeChatRequest(_Strict):
    model: str | None = None
    messages: FirstBad[list[Message]] = Field(min_length=1)
    tools: FirstBad[list[Tool]] | None = None
    add_generation_prompt: bool = True
    chat_template_kwargs: JsonObject | None = None
    return_token_strs: bool | None = False


class DetokenizeRequest(_Strict):
    model: str | None = None
    tokens: FirstBad[list[TokenId]]


class EmbeddingRequest(_Strict):
    model: str | None = None
    input: Any = None
