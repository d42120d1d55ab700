"""Text of a growing list of token ids, and where a stop string ends it."""

from __future__ import annotations

from typing import Any

_REPLACEMENT = "�"


class Detokenizer:
    """Incremental decoding: the text grows by whole characters, and the pieces add up to the decoded whole.

    A token may end inside a multi-byte character, and decoding a token alone may differ from decoding it in its
    context; so each step decodes from a few tokens before the new ones and takes the difference.

    Args:
        tokenizer: a transformers tokenizer.
        stop: strings that end the text before their first occurrence.
        min_tokens: text of the tokens before this many cannot hold a stop string.
    """

    def __init__(
        self,
        tokenizer: Any,
        stop: tuple[str, ...] = (),
        skip_special_tokens: bool = True,
        min_tokens: int = 0,
    ) -> None:
        self._tokenizer, self._stop, self._skip = tokenizer, stop, skip_special_tokens
        self._min_tokens = min_tokens
        self._searchable = 0  # where in the text stop strings may begin
        self._token_ids: list[int] = []
        self._prefix = 0  # tokens before it are not decoded again
        self._read = 0  # tokens before it are in `text`
        self._hold_back = max(map(len, stop), default=1) - 1  # characters that may begin a stop string
        self.text = ""
        self.stop_reason: str | None = None

    def _decode(self, start: int, end: int | None = None) -> str:
        ids = self._token_ids[start:end]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)

    def update(self, token_ids: list[int]) -> bool:
        """Adds tokens; True when a stop string is now complete (text then ends before it)."""
        self._token_ids += token_ids
        before = self._decode(self._prefix, self._read)
        text = self._decode(self._prefix)
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return False
        return self._extend(text[len(before) :])

    def finish(self) -> bool:
        """Takes in what is left, incomplete characters as U+FFFD; True when that completes a stop string."""
        rest = self._decode(self._prefix)[len(self._decode(self._prefix, self._read)) :]
        return self._extend(rest) if rest and self.stop_reason is None else False

    def _extend(self, new: str) -> bool:
        self._prefix, self._read = self._read, len(self._token_ids)
        start = max(self._searchable, len(self.text) - self._hold_back)
        self.text += new
        if len(self._token_ids) < self._min_tokens:
            self._searchable = len(self.text)
            return False
        found = [(i, s) for s in self._stop if (i := self.text.find(s, start)) >= 0]
        if not found:
            return False
        end, self.stop_reason = min(found)
        self.text = self.text[:end]
        return True

    def stable_text(self, finished: bool) -> str:
        """The text that no later token can change: all of it at the end, before that without a possible stop."""
        return self.text if finished or not self._hold_back else self.text[: -self._hold_back]
