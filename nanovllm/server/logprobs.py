"""Log-probabilities in the two forms of OpenAI's API."""

from __future__ import annotations

from typing import Any

from nanovllm.engine.detokenizer import token_bytes
from nanovllm.outputs import Logprob
from nanovllm.server.generation import TokenLogprobs

_LOWEST = -9999.0  # JSON has no -inf


def _entry(tokenizer: Any, token_id: int, logprob: Logprob) -> dict[str, Any]:
    data = token_bytes(tokenizer, token_id)
    return {"token": data.decode(errors="replace"), "logprob": max(logprob.logprob, _LOWEST), "bytes": list(data)}


def chat_logprobs(tokenizer: Any, tokens: list[TokenLogprobs], num_top: int) -> dict[str, Any]:
    """Of chat completions: an entry for each token, each with its num_top most likely ones."""
    content = []
    for token_id, known in tokens:
        top = sorted(known.items(), key=lambda item: item[1].rank)[:num_top]
        entry = _entry(tokenizer, token_id, known[token_id])
        content.append(entry | {"top_logprobs": [_entry(tokenizer, i, logprob) for i, logprob in top]})
    return {"content": content, "refusal": None}


class CompletionLogprobs:
    """Of completions: parallel lists. The offset of a token is where its text begins in the completion's text.

    Args:
        offset: characters before the first token, those of an echoed prompt.
    """

    def __init__(self, tokenizer: Any, num_top: int, offset: int = 0) -> None:
        self._tokenizer, self._num_top, self._offset = tokenizer, num_top, offset

    def take(self, tokens: list[TokenLogprobs]) -> dict[str, Any]:
        """The lists of some more tokens."""
        texts, offsets, top_logprobs = [], [], []
        for token_id, known in tokens:
            texts.append(_entry(self._tokenizer, token_id, known[token_id])["token"])
            offsets.append(self._offset)
            self._offset += len(texts[-1])
            top: dict[str, float] = {}
            for i, logprob in sorted(known.items(), key=lambda item: item[1].rank):
                if i == token_id or len(top) < self._num_top:
                    entry = _entry(self._tokenizer, i, logprob)
                    top.setdefault(entry["token"], entry["logprob"])
            top_logprobs.append(top)
        return {
            "text_offset": offsets,
            "token_logprobs": [max(known[t].logprob, _LOWEST) for t, known in tokens],
            "tokens": texts,
            "top_logprobs": top_logprobs if self._num_top else None,
        }
