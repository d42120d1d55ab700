"""Text of a growing list of token ids, and where a stop string ends it."""

from __future__ import annotations

import codecs
import itertools
from typing import Any
from weakref import WeakKeyDictionary

_REPLACEMENT = "�"
_MAX_SHRINK = 3  # of bytes by a tokenizer's NFC: three Hangul letters become one syllable
_Utf8 = codecs.getincrementaldecoder("utf-8")


def _byte_alphabet() -> dict[str, int]:
    """The characters that byte-level BPE writes bytes as: printable Latin-1 as itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


class _TokenBytes(dict[int, bytes]):
    """Token id to its bytes, filled on demand, for tokenizers whose text is the tokens' bytes one after the other."""

    _alphabet = _byte_alphabet()
    _known: WeakKeyDictionary[Any, dict[bool, _TokenBytes | None]] = WeakKeyDictionary()

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        added = tokenizer.added_tokens_decoder if skip_special_tokens else {}
        super().__init__({i: b"" for i, token in added.items() if token.special})
        self._id_to_token = tokenizer.backend_tokenizer.id_to_token

    @classmethod
    def of(cls, tokenizer: Any, skip_special_tokens: bool) -> _TokenBytes | None:
        """The table of a byte-level tokenizer; None for others."""
        known = cls._known.setdefault(tokenizer, {})
        if skip_special_tokens not in known:
            backend = getattr(tokenizer, "backend_tokenizer", None)
            is_byte_level = type(getattr(backend, "decoder", None)).__name__ == "ByteLevel"
            known[skip_special_tokens] = cls(tokenizer, skip_special_tokens) if is_byte_level else None
        return known[skip_special_tokens]

    def __missing__(self, token_id: int) -> bytes:
        token = self._id_to_token(token_id) or ""
        try:
            data = bytes(map(self._alphabet.__getitem__, token))
        except KeyError:  # an added token, written as it is
            data = token.encode()
        self[token_id] = data
        return data


class _FallbackBytes(dict[int, int]):
    """Token id to its byte, of the tokens <0x00> to <0xFF> that SentencePiece writes characters with that it has no
    token for; empty for tokenizers without."""

    _known: WeakKeyDictionary[Any, _FallbackBytes] = WeakKeyDictionary()

    def __init__(self, tokenizer: Any) -> None:
        vocab = tokenizer.get_vocab()
        names = {f"<0x{byte:02X}>": byte for byte in range(256)}
        super().__init__({vocab[name]: byte for name, byte in names.items() if name in vocab})
        self.letter = vocab.get("<0x41>")
        if self.letter is None or tokenizer.decode([self.letter]) != "A":
            self.clear()

    @classmethod
    def of(cls, tokenizer: Any) -> _FallbackBytes:
        if tokenizer not in cls._known:
            cls._known[tokenizer] = cls(tokenizer)
        return cls._known[tokenizer]


def token_bytes(tokenizer: Any, token_id: int) -> bytes:
    """What one token stands for, special ones included; not always whole characters."""
    table = _TokenBytes.of(tokenizer, skip_special_tokens=False)
    if table is not None:
        return table[token_id]
    if (byte := _FallbackBytes.of(tokenizer).get(token_id)) is not None:
        return bytes([byte])
    return tokenizer.decode([token_id], skip_special_tokens=False, clean_up_tokenization_spaces=False).encode()


def longest_token_bytes(tokenizer: Any) -> int | None:
    """Bytes of text that one token covers at most; None where the tokenizer is not byte-level."""
    if _TokenBytes.of(tokenizer, skip_special_tokens=False) is None:
        return None
    return _MAX_SHRINK * max(len(token.encode()) for token in tokenizer.get_vocab())


class _ByteText:
    """Text of tokens by their bytes."""

    def __init__(self, table: _TokenBytes) -> None:
        self._table, self._utf8 = table, _Utf8("replace")
        self._is_whole = True  # no character has begun

    def add(self, token_ids: list[int]) -> str:
        data = self._table[token_ids[0]] if len(token_ids) == 1 else b"".join([self._table[t] for t in token_ids])
        if self._is_whole and data.isascii():
            return data.decode("ascii")
        text = self._utf8.decode(data)
        self._is_whole = not self._utf8.getstate()[0]
        return text

    def rest(self) -> str:
        return self._utf8.decode(b"", final=True)


class _WindowText:
    """Text of tokens of any tokenizer.

    A token may end inside a multi-byte character, and decoding a token alone may differ from decoding it in its
    context; so each step decodes from a few tokens before the new ones and takes the difference.

    Tokens that are a byte are decoded apart: the tokenizer would write a run of them that does not end with a character
    as U+FFFD for each byte, whole characters before it included.
    """

    def __init__(self, tokenizer: Any, skip_special_tokens: bool) -> None:
        self._tokenizer, self._skip = tokenizer, skip_special_tokens
        self._bytes, self._utf8 = _FallbackBytes.of(tokenizer), _Utf8("replace")
        self._token_ids: list[int] = []  # but for bytes
        self._prefix = 0  # tokens before it are not decoded again
        self._read = 0  # the text of those before it was given

    def _decode(self, start: int, end: int | None = None) -> str:
        ids = self._token_ids[start:end]
        return self._tokenizer.decode(ids, skip_special_tokens=self._skip, clean_up_tokenization_spaces=False)

    def add(self, token_ids: list[int]) -> str:
        if not self._bytes:
            return self._add(token_ids)
        text = ""
        for are_bytes, group in itertools.groupby(token_ids, self._bytes.__contains__):
            run = list(group)
            text += self._add_bytes(run) if are_bytes else self._utf8.decode(b"", final=True) + self._add(run)
        return text

    def _add(self, token_ids: list[int]) -> str:
        self._token_ids += token_ids
        before = self._decode(self._prefix, self._read)
        text = self._decode(self._prefix)
        if len(text) <= len(before) or text.endswith(_REPLACEMENT):
            return ""
        self._prefix, self._read = self._read, len(self._token_ids)
        return text[len(before) :]

    def _add_bytes(self, token_ids: list[int]) -> str:
        text = self._held_back()
        if not self._token_ids:  # the next token is not the first: a space that begins it stays
            self._token_ids.append(self._bytes.letter)
        self._read = len(self._token_ids)
        return text + self._utf8.decode(bytes([self._bytes[t] for t in token_ids]))

    def _held_back(self) -> str:
        before = self._decode(self._prefix, self._read)
        return self._decode(self._prefix)[len(before) :]

    def rest(self) -> str:
        return self._held_back() + self._utf8.decode(b"", final=True)


class Detokenizer:
    """Incremental decoding: the text grows by whole characters, and the pieces add up to the decoded whole.

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
        table = _TokenBytes.of(tokenizer, skip_special_tokens)
        self._source = _WindowText(tokenizer, skip_special_tokens) if table is None else _ByteText(table)
        self._stop, self._min_tokens = stop, min_tokens
        self._searchable = 0  # where in the text stop strings may begin
        self._num_tokens = 0
        self._hold_back = max(map(len, stop), default=1) - 1  # characters that may begin a stop string
        self._num_taken = 0
        self.text = ""
        self.stop_reason: str | None = None

    def advance(self, token_ids: list[int], finished: bool) -> str:
        """update, finish where nothing more comes, and take: the new text that is certain. stop_reason tells a stop."""
        if not self._stop:  # nothing to look for: no text is kept
            new = self._source.add(token_ids)
            return new + self._source.rest() if finished else new
        is_stopped = self.update(token_ids) or (finished and self.finish())
        return self.take(finished or is_stopped)

    def update(self, token_ids: list[int]) -> bool:
        """Adds tokens; True when a stop string is now complete (text then ends before it)."""
        self._num_tokens += len(token_ids)
        new = self._source.add(token_ids)
        return self._extend(new) if new else False

    def finish(self) -> bool:
        """Takes in what is left, incomplete characters as U+FFFD; True when that completes a stop string."""
        if self.stop_reason is not None:
            return False
        rest = self._source.rest()
        return self._extend(rest) if rest else False

    def _extend(self, new: str) -> bool:
        start = max(self._searchable, len(self.text) - self._hold_back)
        self.text += new
        if self._num_tokens < self._min_tokens:
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

    def take(self, finished: bool) -> str:
        """What stable_text has more than at the last take."""
        end = len(self.text) if finished else len(self.text) - self._hold_back
        new = self.text[self._num_taken : end] if end > self._num_taken else ""
        self._num_taken += len(new)
        return new
