"""The online front: requests come and go while the engine runs in its own thread."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import queue
import threading
from collections.abc import AsyncIterator, Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

from nanovllm.config import EngineConfig
from nanovllm.engine.build import build_engine
from nanovllm.engine.llm_engine import CheckedPrompt, Prompt, Request, StepResult
from nanovllm.outputs import RequestOutput
from nanovllm.parallel.progress import WorkerError
from nanovllm.sampling_params import SamplingParams
from nanovllm.token_stream import NewToken, TokenStream

T = TypeVar("T")


class EngineStopped(RuntimeError):
    """The engine was shut down, or cannot go on."""


class _Stream:
    """The newest output of one request. Outputs are cumulative, so a slow reader may skip some and loses nothing."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop, self._ready = loop, asyncio.Event()
        self._item: RequestOutput | BaseException | None = None

    def set(self, item: RequestOutput | BaseException) -> None:
        self._item = item
        self._ready.set()

    fail = set

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

    Attributes:
        max_wakeups_per_second: how often the readers of open_stream are woken, all together; with more streams each
            then gets the tokens of several steps at once. None: for every token.
    """

    def __init__(self, model: str, **options: Any) -> None:
        self.engine, self.default_sampling_params = build_engine(EngineConfig.from_kwargs(model, **options))
        self.config = self.engine.config
        self._streams: dict[str, tuple[_Stream | TokenStream, int]] = {}  # and the index of its first sequence there
        self._commands: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self.max_wakeups_per_second: float | None = None
        self._is_paused = False  # this and the steps that a pause lets through: the engine thread's
        self._num_steps_allowed = 0
        self._is_shut_down = False
        self._fatal: BaseException | None = None
        self._lock = threading.Lock()  # of the flag above and the order of commands
        self._tokenizer_lock = threading.Lock()
        self._thread = threading.Thread(target=self._loop, name="nanovllm-engine", daemon=True)
        self._thread.start()

    @property
    def tokenizer(self) -> Any:
        return self.engine.tokenizer

    @property
    def is_running(self) -> bool:
        """Whether requests can be served: False after shutdown(), or when the engine cannot go on."""
        try:
            self.check_health()
        except EngineStopped:
            return False
        return True

    def check_health(self) -> None:
        """Raises EngineStopped where no request can be served: also when another rank has failed between two steps."""
        error = self._fatal
        if error is None and self._thread.is_alive():
            try:
                self.engine.check_health()
                return
            except RuntimeError as e:
                error = e
        ending = "was shut down" if error is None else f"cannot go on: {error!r}"
        raise EngineStopped(f"AsyncLLM: the engine {ending}") from error

    def check_request(self, prompt: Prompt, params: SamplingParams) -> CheckedPrompt:
        """Token ids of a request that can run, from any thread; raises ValueError or TypeError for one that cannot."""
        with self._tokenizer_lock if isinstance(prompt, str) else contextlib.nullcontext():
            return self.engine.check_request(prompt, params)

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
        if isinstance(prompt, str) or getattr(params, "structured_outputs", None) is not None:
            # Long texts take a while to tokenise, and forms to compile: not in the event loop.
            token_ids = await asyncio.to_thread(self.check_request, prompt, params)
        else:
            token_ids = self.check_request(prompt, params)
        stream = _Stream(asyncio.get_running_loop())
        added: list[Request] = []

        def add() -> None:
            try:
                request = self.engine.add_checked_request(prompt, token_ids, params, request_id, stream=True)
            except BaseException as e:
                _post(stream.loop, stream.fail, e)
                return
            added.append(request)
            self._streams[request.request_id] = stream, 0

        self._command(add)
        try:
            while True:
                output = await stream.get()
                yield output
                if output.finished:
                    return
        finally:
            self.end_requests(added)

    def open_stream(
        self, prompts: Sequence[list[int]], params: SamplingParams, request_id: str | None = None
    ) -> TokenStream:
        """Starts requests whose tokens come one by one, without text: the reader decodes, and looks for params.stop.

        The engine's thread does the least for these: a step's tokens, of all streams, reach the event loop in one call.

        Args:
            prompts: token ids of each, from check_request. request_id: prompt i runs as "{request_id}-{i}".
        Raises:
            RuntimeError: the engine was shut down or cannot go on. Reading raises what ends a request, as generate().
        """
        stream = TokenStream(self, len(prompts) * params.n)
        if params.stop_strings:
            params = dataclasses.replace(params, stop=None)

        def add() -> None:
            try:
                for i, token_ids in enumerate(prompts):
                    name = None if request_id is None else f"{request_id}-{i}"
                    request = self.engine.add_checked_request(token_ids, token_ids, params, name, stream=False)
                    stream.requests.append(request)
                    self._streams[request.request_id] = stream, i * params.n
            except BaseException as e:
                self._end_now(stream.requests)
                _post(stream.loop, stream.fail, e)

        self._command(add)
        return stream

    async def abort(self, request_id: str) -> None:
        """Ends a request; its generate() yields a last output with finish_reason "abort". Unknown ids: nothing.

        Raises:
            TypeError: request_id is no string.
        """
        _check_request_id(request_id)

        def abort() -> None:
            request = self.engine.requests.get(request_id)
            if request is not None:
                running = [s for s in request.sequences if not s.is_finished]
                self.engine.abort(request_id)
                self._publish(StepResult(finished=running))

        self._commands.put(abort)

    def call(self, function: Callable[[], T]) -> Future[T]:
        """Runs function in the engine's thread, between two steps; the future has its result or its exception.

        Raises:
            RuntimeError: the engine was shut down or cannot go on.
        """
        future: Future[T] = Future()

        def command() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(function())
            except BaseException as e:
                future.set_exception(e)

        self._command(command)
        return future

    def set_paused(self, is_paused: bool) -> Future[None]:
        """Holds the engine between two steps, or lets it go on. Requests still come, wait and are aborted meanwhile."""

        def command() -> None:
            self._is_paused, self._num_steps_allowed = is_paused, 0

        return self.call(command)

    def step_paused(self, num_steps: int = 1) -> Future[int]:
        """Lets a paused engine make some steps, fewer where its work ends before; gives how many are allowed now."""
        if isinstance(num_steps, bool) or not isinstance(num_steps, int) or num_steps < 1:
            raise ValueError(f"num_steps: expected an integer >= 1, got {num_steps!r}")

        def command() -> int:
            self._num_steps_allowed = num_steps if self._is_paused and self.engine.has_work else 0
            return self._num_steps_allowed

        return self.call(command)

    def shutdown(self) -> None:
        """Ends all requests and the engine's thread; a second call does nothing."""
        with self._lock:
            if not self._is_shut_down:
                self._is_shut_down = True
                self._commands.put(None)
        self._thread.join()

    def _command(self, command: Callable[[], None]) -> None:
        with self._lock:  # a command before the last one is certain to run
            if self._is_shut_down:
                raise EngineStopped("AsyncLLM: the engine was shut down")
            self.check_health()
            self._commands.put(command)

    def end_requests(self, requests: list[Request]) -> None:
        """Ends requests whose reader has left."""
        self._commands.put(lambda: self._end_now(requests))

    def stop_sequence(self, stream: TokenStream, index: int) -> None:
        """Ends one sequence of a stream, whose reader has found a stop string."""
        self._commands.put(lambda: self._stop_now(stream, index))

    def _deliver(self, items: list[tuple[TokenStream, NewToken]]) -> None:
        """In the event loop: a step's tokens to their streams. Readers that sleep on are woken a little later."""
        loop = items[0][0].loop
        rate = self.max_wakeups_per_second
        interval = len(self._streams) / rate if rate else 0.0
        now = loop.time()
        held = [stream for stream, token in items if not stream.push(token, now, interval)]
        if held:
            loop.call_later(interval, _wake, held)

    # The engine's thread

    def _end_now(self, requests: list[Request]) -> None:
        for request in requests:
            if self._streams.pop(request.request_id, None) is not None:
                self.engine.abort(request.request_id)

    def _stop_now(self, stream: TokenStream, index: int) -> None:
        for request in stream.requests:
            if index < len(request.sequences):
                self.engine.stop_sequence(request.sequences[index])
                if request.is_finished:
                    self._streams.pop(request.request_id, None)
                return
            index -= len(request.sequences)

    def _loop(self) -> None:
        try:
            while self._run_commands():
                if not self._may_step:
                    continue
                try:
                    self._publish(self.engine.step())
                except Exception as e:
                    error = RuntimeError(f"AsyncLLM: a step failed, and with it this request: {e!r}")
                    error.__cause__ = e
                    self._end_streams(error)
                    if _is_fatal(e):
                        raise
                if self._num_steps_allowed:
                    self._num_steps_allowed = self._num_steps_allowed - 1 if self.engine.has_work else 0
        except BaseException as e:
            self._fatal = e
            raise
        finally:
            ending = f"cannot go on: {self._fatal!r}" if self._fatal else "was shut down"
            with self._lock:  # no command comes after this; those that came too late end below
                while not self._commands.empty():
                    if command := self._commands.get():
                        command()
            self._end_streams(EngineStopped(f"AsyncLLM: the engine {ending}"))
            self.engine.close()

    @property
    def _may_step(self) -> bool:
        return self.engine.has_work and (not self._is_paused or self._num_steps_allowed > 0)

    def _run_commands(self) -> bool:
        """Runs what callers have asked for, waiting for it when there is nothing else to do; False: shut down."""
        while True:
            try:
                command = self._commands.get(block=not self._may_step)
            except queue.Empty:
                return True
            if command is None:
                return False
            command()

    def _publish(self, result: StepResult) -> None:
        """Hands a step's news to the readers, in one call into each event loop however many streams the step served."""
        news: dict[asyncio.AbstractEventLoop, list[tuple[TokenStream, NewToken]]] = {}
        with_token = {id(seq) for seq in result.updated} if result.finished else ()
        without = [seq for seq in result.finished if id(seq) not in with_token]
        whole: dict[int, Request] = {}  # requests whose readers get cumulative outputs
        num_updated = len(result.updated)
        for i, seq in enumerate(result.updated + without):
            data: Any = seq.data
            request = data.request
            stream, first = self._streams.get(request.request_id, (None, 0))
            if isinstance(stream, TokenStream):
                token_id = seq.token_ids[-1] if i < num_updated else None
                logprobs = data.logprobs[-1] if data.logprobs and i < num_updated else None
                token = NewToken(first + data.index, token_id, logprobs, seq.finish_reason, seq.stop_reason)
                news.setdefault(stream.loop, []).append((stream, token))
            elif stream is not None:
                whole[id(request)] = request
        outputs: list[tuple[Any, RequestOutput]] = []
        outputs += [(self._streams[r.request_id][0], self.engine.output(r)) for r in whole.values()]
        for seq in result.finished:  # before their readers hear of it
            request = seq.data.request  # type: ignore[attr-defined]
            if request.is_finished:
                self._streams.pop(request.request_id, None)
        for reader, output in outputs:
            _post(reader.loop, reader.set, output)
        for loop, items in news.items():
            _post(loop, self._deliver, items)

    def _end_streams(self, error: BaseException) -> None:
        for request_id, (stream, _) in self._streams.items():
            self.engine.abort(request_id)
            _post(stream.loop, stream.fail, error)
        self._streams.clear()


def _wake(streams: list[TokenStream]) -> None:
    for stream in streams:
        stream.wake()


def _post(loop: asyncio.AbstractEventLoop, call: Callable[[Any], None], item: Any) -> None:
    """From the engine's thread: call(item) on an event loop, soon."""
    with contextlib.suppress(RuntimeError):  # that loop is closed: nobody listens any more
        loop.call_soon_threadsafe(call, item)


def _is_fatal(error: BaseException) -> bool:
    """A CUDA error other than a lack of memory: the process cannot use its GPU any more; or another rank failed."""
    return "CUDA error" in str(error) or isinstance(error, WorkerError)


def _check_request_id(request_id: Any) -> None:
    """In the caller's thread: an id that cannot be a key would end the engine's."""
    if not isinstance(request_id, str):
        raise TypeError(f"request_id: expected a string, got {request_id!r}")
