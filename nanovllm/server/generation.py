"""Tokens of the engine to text for a client: decoding, stop strings, and the logprobs of each token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.async_llm import NewToken, TokenStream
from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.outputs import Logprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.metrics import RequestTimer

TokenLogprobs = tuple[int, dict[int, Logprob]]  # the sampled token, and Logprob of it and the most likely ones


@dataclass(slots=True)
class Piece:
    """What is new of one completion: text, and logprobs of tokens whose text may still be held back."""

    index: int
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    stop_reason: str | int | None


@dataclass(slots=True)
class _Completion:
    detokenizer: Detokenizer
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)


class Generation:
    """The completions of one HTTP request: an async iterator of lists of Piece, one list for each look at the stream.

    Attributes:
        num_tokens: tokens generated so far, those that ended a completion included.
    """

    def __init__(
        self,
        stream: TokenStream,
        tokenizer: Any,
        params: SamplingParams,
        timer: RequestTimer,
        on_close: Callable[[], None],
    ) -> None:
        self.stream, self._timer, self._on_close = stream, timer, on_close
        self.num_tokens = 0
        self._tokenizer, self._params = tokenizer, params
        self._completions: dict[int, _Completion] = {}

    async def __aiter__(self) -> AsyncIterator[list[Piece]]:
        async for tokens in self.stream:
            if len(tokens) == 1:  # the common case
                self._timer.tokens(1, 1)
                pieces = [self._take(tokens[0].index)] if self._add(tokens[0]) else []
            else:
                touched = dict.fromkeys(token.index for token in tokens if self._add(token))
                self._timer.tokens(len(tokens), len(touched))
                pieces = [self._take(index) for index in touched]
            pieces = [p for p in pieces if p.text or p.logprobs or p.finish_reason]
            if pieces:
                yield pieces

    def close(self) -> None:
        """Ends what still runs; a second call does nothing."""
        self.stream.close()
        self._timer.end(self)
        self._on_close()

    @property
    def finish_reasons(self) -> list[str | None]:
        return [c.finish_reason for c in self._completions.values()]

    def _add(self, token: NewToken) -> bool:
        """Takes in a token; False: it came after its completion's end."""
        completion = self._completions.get(token.index)
        if completion is None:
            p = self._params
            detokenizer = Detokenizer(self._tokenizer, p.stop_strings, p.skip_special_tokens, p.min_tokens)
            completion = self._completions[token.index] = _Completion(detokenizer)
        if completion.finish_reason is not None:
            return False
        detokenizer = completion.detokenizer
        if token.token_id is not None:
            self.num_tokens += 1
            if token.logprobs is not None:
                completion.logprobs.append((token.token_id, token.logprobs))
            if detokenizer.update([token.token_id]):
                completion.finish_reason, completion.stop_reason = "stop", detokenizer.stop_reason
                if token.finish_reason is None:
                    self.stream.stop(token.index)
                return True
        if token.finish_reason is not None:
            completion.finish_reason, completion.stop_reason = token.finish_reason, token.stop_reason
            if detokenizer.finish():
                completion.finish_reason, completion.stop_reason = "stop", detokenizer.stop_reason
        return True

    def _take(self, index: int) -> Piece:
        c = self._completions[index]
        logprobs, c.logprobs = c.logprobs, []
        text = c.detokenizer.take(c.finish_reason is not None)
        return Piece(index, text, logprobs, c.finish_reason, c.stop_reason)
