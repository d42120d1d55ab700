"""/v1/completions: prompts to texts."""

from __future__ import annotations

import time
import uuid
from collections.abc import AsyncGenerator
from typing import Any

from nanovllm.sampling_params import SamplingParams
from nanovllm.server.answer import DONE, Answer, event, quoted, to_json
from nanovllm.server.errors import ApiError
from nanovllm.server.generation import Generation, Piece
from nanovllm.server.logprobs import CompletionLogprobs
from nanovllm.server.protocol import CompletionRequest
from nanovllm.server.sampling import may_have_form, parameter_error, sampling_params
from nanovllm.server.service import Service


async def create(service: Service, body: CompletionRequest) -> Answer:
    """Starts the completions that `body` asks for.

    Raises:
        ApiError: it cannot be served.
    """
    arrival = time.perf_counter()
    service.check_model(body.model)
    given: list[Any] = body.prompt if _is_several(body.prompt) else [body.prompt]  # type: ignore[assignment]
    with service.admitted(len(given) * (body.n or 1)) as room:
        prompts, params = await service.prepare(_prepare, service, body, given, compiles=may_have_form(body))
        request_id = f"cmpl-{body.request_id or uuid.uuid4().hex}"
        generation = service.start(prompts, params, f"cmpl-{uuid.uuid4().hex}", arrival, room)
        writer = _Writer(service, body, generation, params, prompts, request_id)
        chunks = writer.stream() if body.stream else writer.whole()
        room.pop_all()  # the answer ends the generation from here on
    return Answer(generation, chunks, bool(body.stream), service.config.request_timeout)


def _is_several(prompt: Any) -> bool:
    return isinstance(prompt, list) and (not prompt or not isinstance(prompt[0], int))


def _prepare(service: Service, body: CompletionRequest, given: list[Any]) -> tuple[list[list[int]], SamplingParams]:
    """Token ids of each prompt, all of which can run."""
    params = sampling_params(body, service.llm.default_sampling_params, 0, [])
    if service.llm.tokenizer is None and (body.echo or body.logprobs is not None):
        name = "echo" if body.echo else "logprobs"
        raise ApiError(400, f"{name}: the model has no tokenizer, got {getattr(body, name)!r}", name)
    prompts = []
    for i, prompt in enumerate(given):
        try:
            token_ids = service.tokenize(prompt, body.add_special_tokens) if isinstance(prompt, str) else prompt
            prompts.append(service.llm.check_request(token_ids, params))
        except (ValueError, TypeError) as e:
            text = str(e)
            if not text.startswith(("prompt: ", "prompt ")):
                raise parameter_error(e) from None
            where = f"prompt[{i}]" if len(given) > 1 else "prompt"
            raise ApiError(400, f"{where}: {text[len('prompt') :].lstrip(': ')}", "prompt") from None
    return prompts, params


class _Writer:
    """Pieces of a generation to the bytes of its answer."""

    def __init__(
        self,
        service: Service,
        body: CompletionRequest,
        generation: Generation,
        params: SamplingParams,
        prompts: list[list[int]],
        request_id: str,
    ) -> None:
        self._generation, self._params, self._prompts = generation, params, prompts
        self._tokenizer = service.llm.tokenizer
        self._echo = [self._text(p) for p in prompts] if body.echo else [""] * len(prompts)
        self._wants_usage = bool(body.stream_options and body.stream_options.include_usage)
        self._head = {
            "id": request_id,
            "object": "text_completion",
            "created": int(time.time()),
            "model": service.names[0],
        }
        self._logprobs = [
            CompletionLogprobs(self._tokenizer, params.logprobs, len(self._echo[i // params.n]))
            for i in range(len(prompts) * params.n if params.logprobs is not None else 0)
        ]

    def _text(self, token_ids: list[int]) -> str:
        return self._tokenizer.decode(token_ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)

    def _usage(self) -> dict[str, Any]:
        return usage(self._generation, sum(map(len, self._prompts)))

    def _choice(self, piece: Piece, text: str) -> dict[str, Any]:
        logprobs = self._logprobs[piece.index].take(piece.logprobs) if self._logprobs else None
        return {
            "index": piece.index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": piece.finish_reason,
            "stop_reason": piece.stop_reason,
        }

    async def whole(self) -> AsyncGenerator[bytes]:
        """The one JSON object of a plain answer."""
        n = self._params.n
        ends = [Piece(i, self._echo[i // n], [], None, None) for i in range(len(self._prompts) * n)]
        async for pieces in self._generation:
            for piece in pieces:
                end = ends[piece.index]
                end.text += piece.text
                end.logprobs += piece.logprobs
                end.finish_reason, end.stop_reason = piece.finish_reason, piece.stop_reason
        yield to_json({**self._head, "choices": [self._choice(e, e.text) for e in ends], "usage": self._usage()})

    async def stream(self) -> AsyncGenerator[bytes]:
        """Events; what is new of a choice in each."""
        tail = {"usage": None} if self._wants_usage else {}
        prefix = b"data: " + to_json(self._head)[:-1] + b',"choices":[{"index":'
        end = b',"usage":null}' if self._wants_usage else b"}"
        suffix = b',"logprobs":null,"finish_reason":null,"stop_reason":null}]' + end + b"\n\n"
        if any(self._echo):
            for index in range(len(self._prompts) * self._params.n):
                echoed = Piece(index, "", [], None, None)
                yield event(
                    {**self._head, "choices": [self._choice(echoed, self._echo[index // self._params.n])], **tail}
                )
        async for pieces in self._generation:
            chunk = b""
            for piece in pieces:
                if piece.finish_reason is None and not piece.logprobs:
                    chunk += b'%b%d,"text":%b%b' % (prefix, piece.index, quoted(piece.text), suffix)
                else:
                    chunk += event({**self._head, "choices": [self._choice(piece, piece.text)], **tail})
            yield chunk
        if self._wants_usage:
            yield event({**self._head, "choices": [], "usage": self._usage()})
        yield DONE


def usage(generation: Generation, num_prompt_tokens: int) -> dict[str, Any]:
    """OpenAI's usage object; tokens of the prompt count once, whatever n is."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": generation.num_tokens,
        "total_tokens": num_prompt_tokens + generation.num_tokens,
        "prompt_tokens_details": {"cached_tokens": generation.stream.num_cached_tokens},
    }
