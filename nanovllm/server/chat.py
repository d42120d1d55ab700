"""/v1/chat/completions: conversations to answers, with thoughts and calls of functions apart from the text."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.server.answer import DONE, Answer, event, quoted, to_json
from nanovllm.server.completions import usage
from nanovllm.server.errors import ApiError
from nanovllm.server.generation import Generation, Piece, TokenLogprobs
from nanovllm.server.logprobs import chat_logprobs
from nanovllm.server.protocol import ChatRequest
from nanovllm.server.reasoning import ThinkParser
from nanovllm.server.sampling import may_have_form, parameter_error, sampling_params
from nanovllm.server.service import Service
from nanovllm.server.tools import PARSERS, ArrayParser, CallPiece, NamedParser, ToolParser

_TAIL = 8  # tokens at a prompt's end that may hold an opening <think>


async def create(service: Service, body: ChatRequest) -> Answer:
    """Starts the answers that `body` asks for.

    Raises:
        ApiError: it cannot be served.
    """
    arrival = time.perf_counter()
    service.check_model(body.model)
    tools = _tools(service, body)
    with service.admitted(body.n or 1) as room:
        prompt, params = await service.prepare(_prepare, service, body, tools, compiles=may_have_form(body))
        generation = service.start([prompt], params, f"chatcmpl-{uuid.uuid4().hex}", arrival, room)
        writer = _Writer(service, body, generation, params, prompt)
        chunks = writer.stream() if body.stream else writer.whole()
        room.pop_all()  # the answer ends the generation from here on
    return Answer(generation, chunks, bool(body.stream), service.config.request_timeout)


def _tools(service: Service, body: ChatRequest) -> list[dict[str, Any]]:
    """The functions that may be called."""
    functions = [tool.function.model_dump(exclude_none=True) for tool in body.tools or ()]
    names = [f["name"] for f in functions]
    if body.tool_choice == "none":
        return []
    if body.tool_choice is not None and body.tool_choice != "auto" and not functions:
        raise ApiError(400, "tool_choice: expected tools to choose from, got none", "tool_choice")
    if body.named_function is not None and body.named_function not in names:
        raise ApiError(
            400, f"tool_choice: expected one of {', '.join(names)}, got {body.named_function!r}", "tool_choice"
        )
    if functions and body.tool_choice in (None, "auto") and service.tool_parser == "none":
        raise ApiError(
            400,
            "tools: the model's chat template has no form of function calls that is known here; set "
            '--tool-call-parser, or send tool_choice "required" or a function, which works with every model',
            "tools",
        )
    return functions


def _prepare(service: Service, body: ChatRequest, tools: list[dict[str, Any]]) -> tuple[list[int], SamplingParams]:
    """The prompt's token ids, and parameters with which it can run."""
    variables = dict(body.chat_template_kwargs or {})
    if body.reasoning_effort is not None:
        variables.setdefault("reasoning_effort", body.reasoning_effort)
    prompt = service.render(
        [m.for_template() for m in body.messages],
        tools=[{"type": "function", "function": f} for f in tools] or None,
        chat_template_kwargs=variables,
        add_generation_prompt=body.add_generation_prompt,
    )
    room = max(service.llm.config.max_model_len - len(prompt), 1)
    params = sampling_params(body, service.llm.default_sampling_params, room, tools)
    try:
        return service.llm.check_request(prompt, params), params
    except ValueError as e:
        raise (ApiError(400, str(e), "messages") if str(e).startswith("prompt") else parameter_error(e)) from None


@dataclass(slots=True)
class _Delta:
    """What is new of an answer."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)

    def to_json(self) -> dict[str, Any]:
        data: dict[str, Any] = {}
        if self.reasoning:
            data["reasoning_content"] = self.reasoning
        if self.content:
            data["content"] = self.content
        if self.calls:
            data["tool_calls"] = [call.to_json(streamed=True) for call in self.calls]
        return data


class _Parser:
    """Text of one answer to deltas."""

    def __init__(self, think: ThinkParser | None, tools: ToolParser | None) -> None:
        self._think, self._tools = think, tools

    @property
    def num_calls(self) -> int:
        return self._tools.num_calls if self._tools is not None else 0

    def feed(self, text: str, finished: bool) -> _Delta:
        reasoning, content = self._think.feed(text, finished) if self._think is not None else ("", text)
        if self._tools is None:
            return _Delta(reasoning, content)
        pieces = list(self._tools.feed(content, finished))
        calls: list[CallPiece] = []
        for piece in pieces:
            if isinstance(piece, CallPiece):
                if calls and calls[-1].index == piece.index and piece.name is None:  # one delta a call and chunk
                    calls[-1].arguments += piece.arguments
                else:
                    calls.append(piece)
        return _Delta(reasoning, "".join(p for p in pieces if isinstance(p, str)), calls)


@dataclass(slots=True)
class _Whole:
    """An answer, as far as it has come."""

    reasoning: str = ""
    content: str = ""
    calls: list[CallPiece] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    end: Piece | None = None

    def add(self, delta: _Delta, piece: Piece) -> None:
        self.reasoning += delta.reasoning
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                self.calls.append(call)
            else:
                self.calls[-1].arguments += call.arguments
        self.logprobs += piece.logprobs
        self.end = piece

    def message(self) -> dict[str, Any]:
        message: dict[str, Any] = {"role": "assistant", "content": self.content or (None if self.calls else "")}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["tool_calls"] = [call.to_json(streamed=False) for call in self.calls]
        return message


class _Writer:
    """Pieces of a generation to the bytes of its answer."""

    def __init__(
        self, service: Service, body: ChatRequest, generation: Generation, params: SamplingParams, prompt: list[int]
    ) -> None:
        self._service, self._body, self._generation = service, body, generation
        self._params, self._prompt = params, prompt
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": f"chatcmpl-{body.request_id or uuid.uuid4().hex}",
            "object": "chat.completion.chunk" if body.stream else "chat.completion",
            "created": int(time.time()),
            "model": service.names[0],
        }
        self._parsers = [self._parser() for _ in range(params.n)]

    def _parser(self) -> _Parser | None:
        """None: every answer is all text."""
        body, service = self._body, self._service
        think = tools = None
        if service.reasoning_parser == "think" and self._params.structured_outputs is None:
            tail = service.llm.tokenizer.decode(self._prompt[-_TAIL:], skip_special_tokens=False)
            think = ThinkParser(is_open=tail.rstrip().endswith("<think>"))
        if body.named_function is not None:
            tools = NamedParser(body.named_function)
        elif body.tool_choice == "required":
            tools = ArrayParser()
        elif body.tools and body.tool_choice != "none" and self._params.structured_outputs is None:
            names = frozenset(tool.function.name for tool in body.tools)
            tools = PARSERS[service.tool_parser](names if service.tool_parser == "llama3_json" else None)
        return None if think is None and tools is None else _Parser(think, tools)

    def _feed(self, piece: Piece) -> _Delta:
        parser = self._parsers[piece.index]
        return _Delta("", piece.text) if parser is None else parser.feed(piece.text, piece.finish_reason is not None)

    def _finish_reason(self, piece: Piece) -> str | None:
        """As OpenAI has it: "tool_calls" for calls that the model decided on."""
        parser = self._parsers[piece.index]
        has_calls = piece.finish_reason == "stop" and parser is not None and parser.num_calls > 0
        return "tool_calls" if has_calls and self._body.named_function is None else piece.finish_reason

    def _logprobs(self, tokens: list[TokenLogprobs]) -> dict[str, Any] | None:
        if self._params.logprobs is None:
            return None
        return chat_logprobs(self._service.llm.tokenizer, tokens, self._params.logprobs)

    def _usage(self) -> dict[str, Any]:
        return usage(self._generation, len(self._prompt))

    async def whole(self) -> AsyncGenerator[bytes]:
        """The one JSON object of a plain answer."""
        answers = [_Whole() for _ in range(self._params.n)]
        async for pieces in self._generation:
            for piece in pieces:
                answers[piece.index].add(self._feed(piece), piece)
        choices = []
        for index, answer in enumerate(answers):
            end = answer.end or Piece(index, "", [], None, None)
            choices.append(
                {
                    "index": index,
                    "message": answer.message(),
                    "logprobs": self._logprobs(answer.logprobs),
                    "finish_reason": self._finish_reason(end),
                    "stop_reason": end.stop_reason,
                }
            )
        yield to_json({**self._head, "choices": choices, "usage": self._usage()})

    async def stream(self) -> AsyncGenerator[bytes]:
        """Events: the role first, then what is new of a choice in each."""
        tail = {"usage": None} if self._wants_usage else {}
        end = b',"usage":null}' if self._wants_usage else b"}"
        prefix = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        suffix = b'},"logprobs":null,"finish_reason":null}]' + end + b"\n\n"
        begun: set[int] = set()
        async for pieces in self._generation:
            chunk = b""
            for piece in pieces:
                if piece.index not in begun:
                    begun.add(piece.index)
                    chunk += b'%b%d,"delta":{"role":"assistant","content":""%b' % (prefix, piece.index, suffix)
                if piece.finish_reason is None and not piece.logprobs and self._parsers[piece.index] is None:
                    chunk += b'%b%d,"delta":{"content":%b%b' % (prefix, piece.index, quoted(piece.text), suffix)
                    continue
                delta = self._feed(piece).to_json()
                if delta or piece.finish_reason or piece.logprobs:
                    choice = {
                        "index": piece.index,
                        "delta": delta,
                        "logprobs": self._logprobs(piece.logprobs) if piece.logprobs else None,
                        "finish_reason": self._finish_reason(piece),
                        "stop_reason": piece.stop_reason,
                    }
                    chunk += event({**self._head, "choices": [choice], **tail})
            if chunk:
                yield chunk
        if self._wants_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE
