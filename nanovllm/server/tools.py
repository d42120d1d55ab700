"""Calls of functions in a model's text, read as they come: the formats of Qwen (hermes) and Llama 3."""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from nanovllm.server.reasoning import held_back

_HEAD = re.compile(
    r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*("(?:[^"\\]|\\.)*")\s*,\s*"(?:arguments|parameters)"\s*:\s*'
)
_PYTHON_TAG = "<|python_tag|>"
_MAPS_OF_SCHEMAS = ("properties", "patternProperties", "$defs", "definitions", "dependentSchemas")
_VALUES = ("const", "enum", "default", "examples")  # keywords of JSON schema that hold no schemas


@dataclass(slots=True)
class CallPiece:
    """A piece of the index-th call: the first one of a call has its name and id, the others more of the arguments."""

    index: int
    name: str | None
    arguments: str
    call_id: str | None = None

    def to_json(self, streamed: bool) -> dict[str, Any]:
        """As OpenAI writes it: a delta, with index and only what is new, or a whole call."""
        function = (
            {"arguments": self.arguments} if self.name is None else {"name": self.name, "arguments": self.arguments}
        )
        call = (
            {"function": function}
            if self.name is None
            else {"id": self.call_id, "type": "function", "function": function}
        )
        return {"index": self.index, **call} if streamed else call


Piece = str | CallPiece  # text for the user, or for a call


class _Value:
    """Finds where a JSON value ends in text that comes in pieces."""

    def __init__(self) -> None:
        self._depth, self._in_string, self._is_escaped, self.began = 0, False, False, False

    def end(self, text: str) -> int | None:
        """Index in text after the value's last character; None: it goes on."""
        for i, c in enumerate(text):
            if self._in_string:
                if self._is_escaped:
                    self._is_escaped = False
                elif c == "\\":
                    self._is_escaped = True
                elif c == '"':
                    self._in_string = False
                    if not self._depth:
                        return i + 1
            elif c == '"':
                self._in_string = self.began = True
            elif c in "{[":
                self._depth += 1
                self.began = True
            elif c in "}]":
                if not self._depth:
                    return i  # a number or a word ended before it
                self._depth -= 1
                if not self._depth:
                    return i + 1
            elif not self._depth and self.began and c in ", \n\t":
                return i
            elif not c.isspace():
                self.began = True
        return None


class _CallReader:
    """One {"name": ..., "arguments": ...} object; arguments are given as they come, as the model writes them."""

    def __init__(self, index: int, names: frozenset[str] | None) -> None:
        self._index, self._names = index, names
        self._value: _Value | None = None
        self._is_named = False
        self.text = ""  # not understood yet
        self.is_done = False

    @property
    def has_begun(self) -> bool:
        return self._is_named

    def feed(self, text: str) -> Iterator[CallPiece]:
        """Takes in text; once is_done, what follows the object stays in self.text."""
        self.text += text
        if not self._is_named:
            yield from self._head()
        if self._value is not None:
            if not self._value.began:
                self.text = self.text.lstrip()
            end = self._value.end(self.text)
            given = self.text[:end]
            if given:
                yield CallPiece(self._index, None, given)
            self.text = self.text[len(given) :]
            if end is not None:
                self._value = None
        if self._is_named and self._value is None and not self.is_done:
            end = self.text.find("}")
            if end >= 0:
                self.text, self.is_done = self.text[end + 1 :], True

    def _head(self) -> Iterator[CallPiece]:
        match = _HEAD.match(self.text)
        if match and self._is_known(name := json.loads(match[1], strict=False)):
            self.text = self.text[match.end() :]
            self._is_named, self._value = True, _Value()
            yield self._first(name)
            return
        if match or "}" not in self.text:
            return
        start = len(self.text) - len(self.text.lstrip())
        try:  # keys in another order: the whole object at once
            call, end = json.JSONDecoder(strict=False).raw_decode(self.text, start)
        except ValueError:
            return
        if isinstance(call, dict) and self._is_known(call.get("name")):
            arguments = call.get("arguments", call.get("parameters", {}))
            yield self._first(call["name"])
            yield CallPiece(self._index, None, arguments if isinstance(arguments, str) else json.dumps(arguments))
            self.text, self._is_named, self.is_done = self.text[end:], True, True

    def _is_known(self, name: Any) -> bool:
        return isinstance(name, str) and (self._names is None or name in self._names)

    def _first(self, name: str) -> CallPiece:
        return CallPiece(self._index, name, "", f"call_{uuid.uuid4().hex[:24]}")


class ToolParser(ABC):
    """Takes an answer piece by piece and gives text and pieces of calls. Text that is no call after all is text."""

    def __init__(self, names: frozenset[str] | None = None) -> None:
        self._names = names
        self._pending = ""
        self._reader: _CallReader | None = None
        self.num_calls = 0

    @abstractmethod
    def feed(self, text: str, finished: bool = False) -> Iterator[Piece]:
        """The next pieces; finished: no more text comes."""

    def _read(self, text: str) -> Iterator[CallPiece]:
        """Passes text to the call that is being read, or to the next one."""
        if self._reader is None:
            self._reader = _CallReader(self.num_calls, self._names)
        had_begun = self._reader.has_begun
        yield from self._reader.feed(text)
        self.num_calls += self._reader.has_begun and not had_begun


class HermesParser(ToolParser):
    """<tool_call>{"name": ..., "arguments": {...}}</tool_call>, any number of them, after or between text."""

    _OPEN, _CLOSE = "<tool_call>", "</tool_call>"

    def feed(self, text: str, finished: bool = False) -> Iterator[Piece]:
        self._pending += text
        while True:
            if self._reader is None:
                start = self._pending.find(self._OPEN)
                if start < 0:
                    break
                before, self._pending = self._pending[:start].rstrip(), self._pending[start + len(self._OPEN) :]
                if before:
                    yield before
                self._reader = _CallReader(self.num_calls, self._names)
            if not self._reader.is_done:
                new, self._pending = self._pending, ""
                yield from self._read(new)
            if self._reader.is_done:
                self._pending, self._reader.text = self._reader.text + self._pending, ""
                end = self._pending.find(self._CLOSE)
                if end < 0:
                    break
                self._reader, self._pending = None, self._pending[end + len(self._CLOSE) :]
                continue
            if not self._reader.has_begun and self._CLOSE in self._reader.text:  # no call: shown as it is
                body, _, rest = self._reader.text.partition(self._CLOSE)
                self._reader, self._pending = None, rest
                yield f"{self._OPEN}{body}{self._CLOSE}"
                continue
            break
        yield from self._rest(finished)

    def _rest(self, finished: bool) -> Iterator[Piece]:
        """Text outside of calls, without what may begin one and without white space that may come before one."""
        if self._reader is None:
            keep = 0 if finished else held_back(self._pending, self._OPEN)
            ready = self._pending[: len(self._pending) - keep]
            if not finished or self.num_calls:
                ready = ready.rstrip()
            self._pending = self._pending[len(ready) :]
            if ready:
                yield ready
        elif finished and not self._reader.has_begun:
            yield self._OPEN + self._reader.text


class LlamaJsonParser(ToolParser):
    """An answer that is {"name": ..., "parameters": {...}}, or several of them with ; or , between; else it is text."""

    _is_text = False

    def feed(self, text: str, finished: bool = False) -> Iterator[Piece]:
        if self._is_text:
            yield text
            return
        self._pending += text
        if self._reader is None and not self.num_calls:
            stripped = self._pending.lstrip().removeprefix(_PYTHON_TAG).lstrip()
            may_be = _PYTHON_TAG.startswith(self._pending.lstrip()) or not stripped
            if not may_be and not stripped.startswith("{"):
                yield from self._as_text()
                return
            if may_be and not finished:
                return
        while self._pending:
            if self._reader is None:
                self._pending = self._pending.lstrip("; ,\n\t").removeprefix(_PYTHON_TAG)
                if not self._pending:
                    break
            new, self._pending = self._pending, ""
            yield from self._read(new)
            if self._reader.is_done:  # type: ignore[union-attr]
                self._pending, self._reader = self._reader.text, None  # type: ignore[union-attr]
        if finished and self._reader is not None and not self._reader.has_begun:
            self._pending = self._reader.text
            yield from self._as_text()

    def _as_text(self) -> Iterator[Piece]:
        self._is_text = True
        if self._pending:
            yield self._pending
        self._pending = ""


class ArrayParser(ToolParser):
    """A JSON array of calls, as the grammar of tool_choice "required" makes it."""

    def feed(self, text: str, finished: bool = False) -> Iterator[Piece]:
        self._pending += text
        while self._pending:
            if self._reader is None:
                self._pending = self._pending.lstrip("[], \n\t")
                if not self._pending:
                    break
            new, self._pending = self._pending, ""
            yield from self._read(new)
            if self._reader.is_done:  # type: ignore[union-attr]
                self._pending, self._reader = self._reader.text, None  # type: ignore[union-attr]


class NamedParser(ToolParser):
    """The arguments of one function, as the grammar of a named tool_choice makes them."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self._name = name

    def feed(self, text: str, finished: bool = False) -> Iterator[Piece]:
        if not self.num_calls:
            self.num_calls = 1
            yield CallPiece(0, self._name, "", f"call_{uuid.uuid4().hex[:24]}")
        if text:
            yield CallPiece(0, None, text)


PARSERS: dict[str, type[ToolParser]] = {"hermes": HermesParser, "llama3_json": LlamaJsonParser}


def detect_parser(chat_template: str | None) -> str:
    """The format that a chat template teaches: hermes, llama3_json or none."""
    template = chat_template or ""
    if "tools" not in template:
        return "none"
    if "<tool_call>" in template:
        return "hermes"
    return "llama3_json" if "parameters" in template and "<|start_header_id|>" in template else "none"


def required_schema(tools: list[dict[str, Any]], parallel: bool) -> dict[str, Any]:
    """JSON schema of an array of calls of any of `tools` (their "function" objects).

    Raises:
        ValueError: the parameters of one are nested too deeply.
    """
    items = []
    for i, tool in enumerate(tools):
        parameters = dict(tool.get("parameters") or {"type": "object"})
        parameters.pop("$id", None)  # references would be relative to it
        try:
            parameters = _moved(parameters, f"/items/anyOf/{i}/properties/parameters")
        except RecursionError:
            raise ValueError(f"tools: the parameters of {tool['name'][:60]!r} are nested too deeply") from None
        items.append(
            {
                "type": "object",
                "properties": {"name": {"const": tool["name"]}, "parameters": parameters},
                "required": ["name", "parameters"],
                "additionalProperties": False,
            }
        )
    schema: dict[str, Any] = {"type": "array", "minItems": 1, "items": {"anyOf": items}}
    if not parallel:
        schema["maxItems"] = 1
    return schema


def _moved(schema: Any, where: str) -> Any:
    """A JSON schema whose references to itself hold where it is a part of another one."""
    if isinstance(schema, list):
        return [_moved(part, where) for part in schema]
    if not isinstance(schema, dict) or "$id" in schema:  # references below an $id are relative to that
        return schema
    moved = {}
    for key, value in schema.items():
        if key == "$ref" and isinstance(value, str) and (value == "#" or value.startswith("#/")):
            value = f"#{where}{value[1:]}"
        elif key in _MAPS_OF_SCHEMAS and isinstance(value, dict):
            value = {name: _moved(part, where) for name, part in value.items()}
        elif key not in _VALUES:
            value = _moved(value, where)
        moved[key] = value
    return moved
