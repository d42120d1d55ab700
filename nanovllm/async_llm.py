"""The online front: requests come and go while the engine runs in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import queue
import threading
from collections.abc import AsyncIterator, Callable
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.build import build_engine
from nanovllm.engine.llm_engine import Prompt, Request
from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams


class _Stream:
    """The newest output of one request. Outputs are cumulative, so a slow reader may skip some and loses nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop, self._ready = loop, asyncio.Event()
        self._item: RequestOutput | BaseException | None = None

    def put(self, item: RequestOutput | BaseException) -> None:
        """From the engine's thread."""
        with contextlib.suppress(RuntimeError):  # the reader's event loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(self._set, item)

    def _set(self, item: RequestOutput | BaseException) -> None:
        self._item = item
        self._ready.set()

    async def get(self) -> RequestOutput:
        await self._ready.wait()
        self._ready.clear()
        if isinstance(self._item, BaseException):
            raise self._item
        assert self._item is not None
        return self._item


class AsyncLLM:
    """An engine for asyncio programs: many generate() calls share its steps.

    Args: as LLM. A request that can never run raises from its own generate(); an error of a step ends every request
    that was running with a RuntimeError and leaves the engine usable.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine, self.default_sampling_params = build_engine(EngineConfig.from_kwargs(model, **options))
        self.config = self.engine.config
        self._streams: dict[str, _Stream] = {}  # the engine thread's
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._is_shut_down = False
        self._lock = threading.Lock()  # of the flag above and the order of commands
        self._tokenizer_lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="nanovllm-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams | None = None, request_id: str | None = None
    ) -> AsyncIterator[RequestOutput]:
        """Yields the request's cumulative output whenever it grew; the last one has finished=True.

        Leaving the iteration early (break, cancellation) aborts the request.

        Raises:
            ValueError, TypeError: the request can never run, or request_id is in use. RuntimeError: a step failed, or
            the engine was shut down.
        """
        params = self.default_sampling_params if sampling_params is None else sampling_params
        if request_id is not None:
            _check_request_id(request_id)
        with self._tokenizer_lock:
            token_ids = self.engine.check_request(prompt, params)
        stream = _Stream(asyncio.get_running_loop())
        added: list[Request] = []

        def add() -> None:
            try:
                request = self.engine.add_checked_request(prompt, token_ids, params, request_id, stream=True)
            except BaseException as e:
                stream.put(e)
                return
            added.append(request)
            self._streams[request.request_id] = stream

        def abort() -> None:
            if added and self._streams.pop(added[0].request_id, None) is not None:
                self.engine.abort(added[0].request_id)

        with self._lock:  # a command before the last one is certain to run
            if self._is_shut_down:
                raise RuntimeError("AsyncLLM: the engine was shut down")
            self._commands.put(add)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self._commands.put(abort)

    async def abort(self, request_id: str) -> None:
        """Ends a request; its generate() yields a last output with finish_reason "abort". Unknown ids: nothing.

        Raises:
            TypeError: request_id is no string.
        """
        _check_request_id(request_id)

        def abort() -> None:
            request = self.engine.requests.get(request_id)
            self.engine.abort(request_id)
            if request is not None:
                self._publish(request)

        self._commands.put(abort)

    def shutdown(self) -> None:
        """Ends all requests and the engine's thread; a second call does nothing."""
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                self._commands.put(None)
        self._thread.join()

    # The engine's thread

    def _loop(self) -> None:
        while self._run_commands():
            if not self.engine.has_work:
                continue
            try:
                result = self.engine.step()
                for request in {id(s.data.request): s.data.request for s in result.updated + result.finished}.values():  # type: ignore[attr-defined]
                    self._publish(request)
            except Exception as e:
                error = RuntimeError(f"AsyncLLM: a step failed, and with it this request: {e!r}")
                error.__cause__ = e
                self._end_streams(error)
        self._end_streams(RuntimeError("AsyncLLM: the engine was shut down"))

    def _run_commands(self) -> bool:
        """Runs what callers have asked for, waiting for it when there is nothing else to do; False: shut down."""
        while True:
            try:
                command = self._commands.get(block=not self.engine.has_work)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _publish(self, request: Request) -> None:
        finished = request.is_finished
        stream = self._streams.pop(request.request_id, None) if finished else self._streams.get(request.request_id)
        if stream is not None:
            stream.put(self.engine.output(request))

    def _end_streams(self, error: BaseException) -> None:
        for request_id, stream in self._streams.items():
            self.engine.abort(request_id)
            stream.put(error)
        self._streams.clear()


def _check_request_id(request_id: Any) -> None:
    """In the caller's thread: an id that cannot be a key would end the engine's."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id: expected a string, got {request_id!r}")
