"""The prompts of a completion, checked up to the first bad item: lists of them have a million items."""

from __future__ import annotations

from typing import Any

from nanovllm.server.errors import ApiError
from nanovllm.server.problems import described

Prompts = str | list[str] | list[int] | list[list[int]]


def check_prompts(value: Any) -> Prompts:
    """A text, token ids, or a list of either, with whole floats as integers.

    pydantic would try each item as each of these kinds, and write an error for every item and kind.

    Raises:
        ApiError: it is none of them; the text names the first bad item.
    """
    if isinstance(value, str):
        return _text(value, "prompt")
    if not isinstance(value, list):
        raise _refusal("prompt", "a string, token ids, or a list of either", value)
    if not value:
        raise ApiError(400, "prompt: expected at least 1 item, got none", "prompt")
    if isinstance(value[0], str):
        return [_text(item, f"prompt[{i}]") for i, item in enumerate(value)]
    if isinstance(value[0], list):
        return [_token_ids(item, f"prompt[{i}]") for i, item in enumerate(value)]
    if isinstance(value[0], (int, float)):
        return _token_ids(value, "prompt")
    raise _refusal("prompt[0]", "a string, a token id or a list of token ids", value[0])


def _text(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value:
        raise _refusal(where, "a string of at least 1 character", value)
    return value


def _token_ids(value: Any, where: str) -> list[int]:
    if not isinstance(value, list):
        raise _refusal(where, "a list of token ids", value)
    if not value:
        raise ApiError(400, f"{where}: expected at least 1 item, got none", where)
    if set(map(type, value)) == {int} and min(value) >= 0:
        return value
    token_ids = []
    for i, item in enumerate(value):
        is_whole = type(item) is int or (isinstance(item, float) and item.is_integer())  # 5.0 is an integer in JSON
        if not is_whole or item < 0:
            raise _refusal(f"{where}[{i}]", "a token id, an integer >= 0", item)
        token_ids.append(int(item))
    return token_ids


def _refusal(where: str, expected: str, value: Any) -> ApiError:
    return ApiError(400, f"{where}: expected {expected}, got {described(value)}", where)
