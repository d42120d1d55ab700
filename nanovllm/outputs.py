"""What a request gives back. Names are vLLM's; every field is an attribute and a key."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any


class _Keyed:
    """Key access to the fields, as nano-vLLM's dict outputs have it: out["text"] is out.text."""

    __slots__ = ()

    def __getitem__(self, key: str) -> Any:
        if key in self.keys():
            return getattr(self, key)
        raise KeyError(key)

    def keys(self) -> list[str]:
        return [f.name for f in fields(self)]  # type: ignore[arg-type]


@dataclass(slots=True)
class Logprob:
    """Log-probability of one token at one position, and its rank there (1 is the most likely)."""

    logprob: float
    rank: int


@dataclass(slots=True)
class CompletionOutput(_Keyed):
    """One completion of a prompt.

    token_ids holds every sampled token, the EOS or stop token included; text leaves special tokens out
    (skip_special_tokens) and ends before a stop string. finish_reason: "stop", "length", "abort", or None while it
    runs; stop_reason: the stop string or stop token id that ended it. logprobs: one dict a token.
    """

    index: int
    text: str
    token_ids: list[int]
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    logprobs: list[dict[int, Logprob]] | None = None


@dataclass(slots=True)
class RequestOutput(_Keyed):
    """All completions of one prompt; the fields text to logprobs mirror outputs[0].

    num_cached_tokens: prompt tokens whose K/V came from the prefix cache. time_to_first_token and latency are seconds
    from the request's arrival, None until known.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    finished: bool
    num_cached_tokens: int = 0
    time_to_first_token: float | None = None
    latency: float | None = None
    text: str = field(init=False)
    token_ids: list[int] = field(init=False)
    finish_reason: str | None = field(init=False)
    logprobs: list[dict[int, Logprob]] | None = field(init=False)

    def __post_init__(self) -> None:
        first = self.outputs[0]
        self.text, self.token_ids = first.text, first.token_ids
        self.finish_reason, self.logprobs = first.finish_reason, first.logprobs
