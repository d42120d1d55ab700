"""One model as a service: checks requests, prepares them off the event loop, and starts them in the engine."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

from nanovllm.async_llm import AsyncLLM, EngineStopped
from nanovllm.engine.chat import check_text, render_chat_text
from nanovllm.engine.detokenizer import longest_token_bytes
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.config import ServerConfig
from nanovllm.server.errors import ApiError
from nanovllm.server.generation import Generation
from nanovllm.server.metrics import Metrics, RequestTimer
from nanovllm.server.template import read_template
from nanovllm.server.tools import detect_parser

T = TypeVar("T")
_NUM_WORKERS = 4  # threads that tokenise prompts
_NUM_COMPILERS = 2  # threads for requests whose answer has a form: a compile may take a second


class Service:
    """What the routes share.

    Attributes:
        names: the model's names in the API, the first one in answers.
        tool_parser: hermes, llama3_json or none. reasoning_parser: think or none.
    """

    def __init__(self, llm: AsyncLLM, config: ServerConfig) -> None:
        self.llm, self.config = llm, config
        llm.max_wakeups_per_second = config.max_chunks_per_second or None
        self.names = config.served_model_name or (llm.config.model,)
        self.created = int(time.time())
        self.metrics = Metrics(llm, self.names[0])
        self.chat_template = read_template(config.chat_template) if config.chat_template else None
        template = self.chat_template or getattr(llm.tokenizer, "chat_template", None) or ""
        template = template if isinstance(template, str) else "\n".join(template.values())
        wants_tools, wants_reasoning = config.tool_call_parser, config.reasoning_parser
        self.tool_parser = detect_parser(template) if wants_tools == "auto" else wants_tools
        has_thoughts = "<think>" in template or "enable_thinking" in template
        self.reasoning_parser = ("think" if has_thoughts else "none") if wants_reasoning == "auto" else wants_reasoning
        self._longest_token = None
        if llm.tokenizer is not None:
            llm.tokenizer.encode("")  # sets what the tokenizer's file left to be set, so that threads only read later
            self._longest_token = longest_token_bytes(llm.tokenizer)
        self._workers = ThreadPoolExecutor(_NUM_WORKERS, thread_name_prefix="nanovllm-prepare")
        self._compilers = ThreadPoolExecutor(_NUM_COMPILERS, thread_name_prefix="nanovllm-compile")
        self.num_open = 0  # sequences asked for and not ended
        self._generations: set[Generation] = set()

    def begin_shutdown(self) -> None:
        """What runs may end within shutdown_timeout; the rest then hears that the server is going."""

        asyncio.get_running_loop().call_later(self.config.shutdown_timeout, self.end_all)

    def end_all(self) -> None:
        """Ends every request with the news that the server is going."""
        for generation in list(self._generations):
            generation.stream.close(EngineStopped("the server is shutting down"))

    def close(self) -> None:
        for executor in (self._workers, self._compilers):
            executor.shutdown(wait=False, cancel_futures=True)

    # Checks

    def check_model(self, name: str | None) -> None:
        if name is not None and name not in self.names:
            raise ApiError(
                404, f"model: expected {' or '.join(self.names)}, got {name!r}", "model", code="model_not_found"
            )

    @contextmanager
    def admitted(self, num_sequences: int) -> Iterator[ExitStack]:
        """Room in the queue for as long as the context lasts; start() takes the stack over, and keeps it until the end.

        Raises:
            ApiError: the queue is full. EngineStopped: no request can be served.
        """
        self.llm.check_health()
        limit = self.llm.config.max_running + self.config.max_queue
        if self.num_open + num_sequences > limit:
            self.metrics.refused += 1
            raise ApiError(
                429,
                f"the server is busy: {self.num_open} sequences run or wait, {num_sequences} more asked for, "
                f"at most {limit} may; try again later",
                code="queue_full",
                headers={"Retry-After": "1"},
            )
        self.num_open += num_sequences
        with ExitStack() as stack:
            stack.callback(self._release, num_sequences)
            yield stack

    def _release(self, num_sequences: int) -> None:
        self.num_open -= num_sequences

    # Work that takes time

    async def prepare(self, work: Callable[..., T], *args: Any, compiles: bool = False) -> T:
        """work(*args) in a worker thread; one that compiles a form is in nobody else's way."""
        executor = self._compilers if compiles else self._workers
        return await asyncio.get_running_loop().run_in_executor(executor, work, *args)

    def render(self, messages: list[dict[str, Any]], **template: Any) -> list[int]:
        """Token ids of a conversation.

        Raises:
            ApiError: the template refused it, or it is too long for the model.
        """
        try:
            text = render_chat_text(self.llm.tokenizer, messages, chat_template=self.chat_template, **template)
            return self._encode(text, add_special_tokens=False)
        except ValueError as e:
            name = "chat_template_kwargs" if str(e).startswith("chat_template_kwargs") else "messages"
            raise ApiError(400, str(e), name) from None

    def tokenize(self, prompt: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of a text; ValueError when it is too long for the model."""
        if self.llm.tokenizer is None:
            raise ApiError(400, "prompt: expected token ids, because the model has no tokenizer, got text", "prompt")
        return self._encode(prompt, add_special_tokens)

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        check_text("prompt", text)
        limit = self.llm.config.max_model_len
        if self._longest_token is not None and (size := len(text.encode())) > limit * self._longest_token:
            # Told without tokenising, which takes seconds for megabytes of text.
            raise ValueError(
                f"prompt of {size} bytes has at least {-(-size // self._longest_token)} tokens: expected fewer than "
                f"max_model_len = {limit}"
            )
        return self.llm.tokenizer.encode(text, add_special_tokens=add_special_tokens)

    def start(
        self, prompts: list[list[int]], params: SamplingParams, request_id: str, arrival: float, admitted: ExitStack
    ) -> Generation:
        """Starts checked prompts in the engine; admitted ends them at its exit, unless pop_all() has emptied it."""
        stream = self.llm.open_stream(prompts, params, request_id)
        timer, room = RequestTimer(self.metrics, arrival), admitted.pop_all()
        generation = Generation(stream, self.llm.tokenizer, params, timer, room.close)
        self._generations.add(generation)
        room.callback(self._generations.discard, generation)
        admitted.callback(generation.close)
        return generation
