"""Tokens of the engine to text for a client: decoding, stop strings, and the logprobs of each token."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from nanovllm.engine.detokenizer import Detokenizer
from nanovllm.outputs import Logprob
from nanovllm.sampling_params import SamplingParams
from nanovllm.server.metrics import RequestTimer
from nanovllm.token_stream import NewToken, TokenStream

TokenLogprobs = tuple[int, dict[int, Logprob]]  # the sampled token, and Logprob of it and the most likely ones


@dataclass(slots=True)
class Piece:
    """What is new of one completion: text, and logprobs of tokens whose text may still be held back."""

    index: int
    text: str
    logprobs: list[TokenLogprobs]
    finish_reason: str | None
    stop_reason: str | int | None


class _Completion:
    """Text and end of one completion."""

    __slots__ = ("detokenizer", "finish_reason", "index", "stop_reason")

    def __init__(self, index: int, tokenizer: Any, p: SamplingParams) -> None:
        self.index = index
        self.detokenizer = None
        if tokenizer is not None:
            self.detokenizer = Detokenizer(tokenizer, p.stop_strings, p.skip_special_tokens, p.min_tokens)
        self.finish_reason: str | None = None
        self.stop_reason: str | int | None = None


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
                pieces = self._advance(tokens[0].index, tokens)
            else:
                by_index: dict[int, list[NewToken]] = {}
                for token in tokens:
                    by_index.setdefault(token.index, []).append(token)
                self._timer.tokens(len(tokens), len(by_index))
                pieces = [piece for index, news in by_index.items() for piece in self._advance(index, news)]
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

    def _advance(self, index: int, tokens: list[NewToken]) -> list[Piece]:
        """What some more tokens of a completion give to show: one piece, or none yet."""
        completion = self._completions.get(index)
        if completion is None:
            completion = self._completions[index] = _Completion(index, self._tokenizer, self._params)
        if completion.finish_reason is not None:
            return []
        if self._params.stop_strings:  # a stop string ends it at a certain token, however many come at once
            news = [self._decode(completion, [token]) for token in tokens if completion.finish_reason is None]
        else:
            news = [self._decode(completion, tokens)]
        text = "".join(news)
        logprobs: list[TokenLogprobs] = []
        if self._params.logprobs is not None:
            seen = tokens[: len(news)] if self._params.stop_strings else tokens
            logprobs = [(t.token_id, t.logprobs) for t in seen if t.token_id is not None and t.logprobs is not None]
        if not text and not logprobs and completion.finish_reason is None:
            return []
        return [Piece(index, text, logprobs, completion.finish_reason, completion.stop_reason)]

    def _decode(self, completion: _Completion, tokens: list[NewToken]) -> str:
        last, detokenizer = tokens[-1], completion.detokenizer
        token_ids = [t.token_id for t in tokens if t.token_id is not None]
        self.num_tokens += len(token_ids)
        completion.finish_reason, completion.stop_reason = last.finish_reason, last.stop_reason
        if detokenizer is None:
            return ""
        text = detokenizer.advance(token_ids, last.finish_reason is not None)
        if detokenizer.stop_reason is not None:
            completion.finish_reason, completion.stop_reason = "stop", detokenizer.stop_reason
            if last.finish_reason is None:
                self.stream.stop(completion.index)
        return text
