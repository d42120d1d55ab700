"""Tokens on their way from the engine's thread to one reader in an event loop."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, NamedTuple

from nanovllm.engine.llm_engine import Request
from nanovllm.outputs import Logprob

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM


class NewToken(NamedTuple):
    """One more token of a sequence of a TokenStream.

    index: of prompt i with n completions each, i * n + completion. token_id: None for a sequence that ended without
    one. finish_reason, stop_reason: of the sequence, None while it runs.
    """

    index: int
    token_id: int | None
    logprobs: dict[int, Logprob] | None
    finish_reason: str | None
    stop_reason: str | int | None


class TokenStream:
    """Async iterator of what came since the last look at one call of AsyncLLM.open_stream: lists of NewToken.

    All methods are for the event loop that opened the stream. A reader that is late gets the tokens of several steps
    in one list. close() ends what still runs.

    Attributes:
        requests: the engine's records, once it has queued them. error: what ended the stream.
    """

    def __init__(self, llm: AsyncLLM, num_sequences: int) -> None:
        self.loop = asyncio.get_running_loop()
        self.requests: list[Request] = []
        self.error: BaseException | None = None
        self._llm, self._num_open = llm, num_sequences
        self._news: list[NewToken] = []
        self._stopped: set[int] = set()
        self._waiter: asyncio.Future[None] | None = None
        self._is_ready = False  # the reader may look at the news
        self._next_wake = 0.0  # loop.time() from which on another token wakes the reader

    def __aiter__(self) -> TokenStream:
        return self

    async def __anext__(self) -> list[NewToken]:
        while not (self._is_ready and self._news):
            if self._num_open <= 0 and not self._news:
                if self.error is not None:
                    raise self.error
                raise StopAsyncIteration
            self._waiter = self.loop.create_future()
            await self._waiter
        news, self._news = self._news, []
        self._is_ready = self._num_open <= 0
        return news

    @property
    def num_cached_tokens(self) -> int:
        """Prompt tokens whose K/V came from the prefix cache, of all prompts; known once each has a token."""
        return sum(max(r.sequences[0].num_prefix_tokens, 0) for r in self.requests)

    def stop(self, index: int) -> None:
        """Ends the sequence at this index, as a stop string does; its tokens after the last one read are dropped."""
        if index in self._stopped:
            return
        self._stopped.add(index)
        dropped = [token for token in self._news if token.index == index]
        self._news = [token for token in self._news if token.index != index]
        if not any(token.finish_reason for token in dropped):
            self._num_open -= 1
            self._llm.stop_sequence(self, index)
        if self._num_open <= 0:
            self.wake()

    def close(self, error: BaseException | None = None) -> None:
        """Ends the requests that still run; the iteration ends too, with `error` if there is one."""
        if self._num_open > 0:
            self._num_open, self.error = 0, error
            self._llm.end_requests(self.requests)
        self.wake()

    # For AsyncLLM, in the event loop

    def push(self, token: NewToken, now: float, interval: float) -> bool:
        """Takes in a token; False: its reader sleeps on, because it was woken less than `interval` seconds ago."""
        if self._stopped and token.index in self._stopped:
            return True
        self._news.append(token)
        if token.finish_reason is not None:
            self._num_open -= 1
        elif now < self._next_wake:
            return False
        self._next_wake = now + interval
        self.wake()
        return True

    def fail(self, error: BaseException) -> None:
        self.error, self._num_open = error, 0
        self.wake()

    def wake(self) -> None:
        """Lets the reader look at what has come."""
        self._is_ready = True
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():  # done: the reader's task was cancelled
            waiter.set_result(None)
