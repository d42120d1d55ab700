"""Splits what a model thinks, between <think> and </think>, from what it answers."""

from __future__ import annotations

_OPEN, _CLOSE = "<think>", "</think>"


def held_back(text: str, tag: str) -> int:
    """How many characters at the end of text may be the beginning of tag."""
    return next((n for n in range(min(len(tag) - 1, len(text)), 0, -1) if tag.startswith(text[-n:])), 0)


class ThinkParser:
    """Takes text piece by piece and gives (reasoning, content) pieces; blank lines around the tags are dropped.

    A text without <think> at its beginning is all content. One that ends before </think> is all reasoning.

    Args:
        is_open: the prompt ends with <think>, so the text begins inside.
    """

    def __init__(self, is_open: bool = False) -> None:
        self._state = "inside" if is_open else "start"
        self._pending = ""  # not given yet
        self._is_blank = True  # nothing but white space was seen in this state

    def feed(self, text: str, finished: bool = False) -> tuple[str, str]:
        """The next pieces of reasoning and content; finished: no more text comes."""
        self._pending += text
        reasoning = content = ""
        if self._state == "start":
            stripped = self._pending.lstrip()
            if stripped.startswith(_OPEN):
                self._enter("inside", stripped[len(_OPEN) :])
            elif finished or not _OPEN.startswith(stripped):
                self._state = "plain"
        if self._state == "inside":
            end = self._pending.find(_CLOSE)
            if end >= 0:
                reasoning = self._strip(self._pending[:end]).rstrip()
                self._enter("after", self._pending[end + len(_CLOSE) :])
            else:
                keep = 0 if finished else held_back(self._pending, _CLOSE)
                ready = self._pending[: len(self._pending) - keep].rstrip()
                reasoning, self._pending = self._strip(ready), self._pending[len(ready) :]
        if self._state == "after":
            content, self._pending = self._strip(self._pending), ""
        elif self._state == "plain":
            content, self._pending = self._pending, ""
        return reasoning, content

    def _enter(self, state: str, text: str) -> None:
        self._state, self._pending, self._is_blank = state, text, True

    def _strip(self, text: str) -> str:
        """text without the white space that the state began with."""
        if self._is_blank:
            text = text.lstrip()
            self._is_blank = not text
        return text
