"""Thoughts and calls in text that comes in pieces: every way to cut it gives the same."""

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from nanovllm.server.reasoning import ThinkParser
from nanovllm.server.tools import (
    ArrayParser,
    CallPiece,
    HermesParser,
    LlamaJsonParser,
    NamedParser,
    ToolParser,
    detect_parser,
    required_schema,
)


def cuts(text: str) -> Iterator[list[str]]:
    """The whole, single characters, and random pieces."""
    yield [text]
    yield list(text)
    rng = random.Random(len(text))
    for _ in range(30):
        ends = sorted(rng.randrange(len(text) + 1) for _ in range(rng.randrange(1, 8)))
        yield [text[a:b] for a, b in zip([0, *ends], [*ends, len(text)])]


THOUGHTS = {
    "<think>\nhm, 2\n</think>\n\nFour": ("hm, 2", "Four"),
    "<think></think>x": ("", "x"),
    "\n<think>a</think> b </think> c": ("a", "b </think> c"),
    "<think>a < b </thin k</think>y": ("a < b </thin k", "y"),
    "plain <think>no</think>": ("", "plain <think>no</think>"),
    "<thin": ("", "<thin"),
    "  text ": ("", "  text "),
    "<think>never closed ": ("never closed", ""),
    "": ("", ""),
}


@pytest.mark.parametrize("text", THOUGHTS)
def test_thoughts_in_any_pieces(text: str) -> None:
    for pieces in cuts(text):
        parser = ThinkParser()
        got = [parser.feed(piece) for piece in pieces] + [parser.feed("", finished=True)]
        reasoning, content = ("".join(part) for part in zip(*got))
        assert (reasoning.rstrip(), content) == THOUGHTS[text], pieces


def test_thoughts_that_the_prompt_opened() -> None:
    parser = ThinkParser(is_open=True)
    assert parser.feed("so\n</think>\nYes", finished=True) == ("so", "Yes")


def read(parser: ToolParser, pieces: list[str]) -> tuple[str, list[tuple[str, str]]]:
    """Text and (name, arguments) of all that the parser gives."""
    text, calls = "", []
    for i, piece in enumerate(pieces):
        for part in parser.feed(piece, finished=i == len(pieces) - 1):
            if isinstance(part, str):
                text += part
            elif part.name is not None:
                assert part.index == len(calls) and part.call_id.startswith("call_")
                calls.append([part.name, ""])
            else:
                calls[part.index][1] += part.arguments
    assert parser.num_calls == len(calls)
    return text, [(name, arguments) for name, arguments in calls]


ARGUMENTS = '{"city": "São \\"Paulo\\" }", "n": [1, {"x": "]"}]}'
CALL = f'{{"name": "weather", "arguments": {ARGUMENTS}}}'
HERMES = {
    f"<tool_call>\n{CALL}\n</tool_call>": ("", [("weather", ARGUMENTS)]),
    f"I look. \n<tool_call>\n{CALL}\n</tool_call>\n<tool_call>{CALL}</tool_call>": (
        "I look.",
        [("weather", ARGUMENTS), ("weather", ARGUMENTS)],
    ),
    '<tool_call>{"arguments": {"a": 1}, "name": "f"}</tool_call>': ("", [("f", '{"a": 1}')]),
    '<tool_call>{"name": "f", "arguments": {}}': ("", [("f", "{}")]),
    "<tool_call>oops</tool_call> then": ("<tool_call>oops</tool_call> then", []),
    "<tool_call>oops": ("<tool_call>oops", []),
    "a < b <tool": ("a < b <tool", []),
    "no call  \n": ("no call  \n", []),
}
LLAMA = {
    '{"name": "f", "parameters": {"a": 1}}': ("", [("f", '{"a": 1}')]),
    '<|python_tag|>{"type": "function", "name": "f", "parameters": {}}': ("", [("f", "{}")]),
    '{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"b": "x"}}': (
        "",
        [("f", "{}"), ("g", '{"b": "x"}')],
    ),
    '{"name": "other", "parameters": {}}': ('{"name": "other", "parameters": {}}', []),
    '{"answer": 42}': ('{"answer": 42}', []),
    '{"name": "f", "para': ('{"name": "f", "para', []),
    "Hello {": ("Hello {", []),
}


@pytest.mark.parametrize("text", HERMES)
def test_hermes_in_any_pieces(text: str) -> None:
    for pieces in cuts(text):
        assert read(HermesParser(), pieces) == HERMES[text], pieces


@pytest.mark.parametrize("text", LLAMA)
def test_llama_in_any_pieces(text: str) -> None:
    for pieces in cuts(text):
        assert read(LlamaJsonParser(frozenset("fg")), pieces) == LLAMA[text], pieces


@pytest.mark.parametrize(
    "make, text, calls",
    [
        (ArrayParser, f'[{{"name": "f", "parameters": {ARGUMENTS}}}, {{"name": "g", "parameters": {{}}}}]', ["f", "g"]),
        (lambda: NamedParser("f"), ARGUMENTS, ["f"]),
    ],
)
def test_forced_calls_in_any_pieces(make: Callable[[], ToolParser], text: str, calls: list[str]) -> None:
    for pieces in cuts(text):
        content, got = read(make(), pieces)
        assert content == "" and [name for name, _ in got] == calls and got[0][1] == ARGUMENTS


def test_arguments_come_as_they_are_written() -> None:
    parser = HermesParser()
    list(parser.feed('<tool_call>{"name": "f", "arguments": {"text": "'))
    (piece,) = parser.feed("once upon")
    assert isinstance(piece, CallPiece) and piece.arguments == "once upon"


@pytest.mark.parametrize(
    "template, name",
    [
        ("{% if tools %}<tool_call>{% endif %}", "hermes"),
        ('{% if tools %}{"name": n, "parameters": p}<|start_header_id|>{% endif %}', "llama3_json"),
        ("{{ messages }}", "none"),
        (None, "none"),
    ],
)
def test_the_format_is_read_off_the_template(template: str | None, name: str) -> None:
    assert detect_parser(template) == name


@pytest.mark.parametrize("keyword", ["$defs", "definitions", "properties"])
def test_references_of_required_calls_lead_to_their_own_function(keyword: str) -> None:
    def function(name: str, kind: str) -> dict[str, Any]:
        properties = {"a": {"$ref": f"#/{keyword}/X"}, "const": {"$ref": f"#/{keyword}/X"}}
        parameters = {"type": "object", "properties": properties, "required": ["a", "const"]}
        parameters.setdefault(keyword, {})["X"] = {"type": kind}
        return {"name": name, "parameters": parameters | {"additionalProperties": False, "$id": "https://example/f"}}

    schema = required_schema([function("f", "integer"), function("g", "boolean")], parallel=False)
    assert schema["maxItems"] == 1
    for i, kind in enumerate(("integer", "boolean")):
        properties = schema["items"]["anyOf"][i]["properties"]["parameters"]["properties"]
        for name in ("a", "const"):
            place: Any = schema
            for part in properties[name]["$ref"].removeprefix("#/").split("/"):
                place = place[int(part)] if isinstance(place, list) else place[part]
            assert place == {"type": kind}


def test_values_that_look_like_references_stay() -> None:
    literal = {"$ref": "#/x"}
    parameters = {"properties": {"a": {"const": literal, "default": literal}, "b": {"enum": [literal]}}}
    schema = required_schema([{"name": "f", "parameters": parameters}], parallel=True)
    assert schema["items"]["anyOf"][0]["properties"]["parameters"] == parameters


def test_deep_parameters_of_required_calls_are_refused() -> None:
    deep: Any = {}
    for _ in range(5000):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="tools: the parameters of 'f' are nested too deeply"):
        required_schema([{"name": "f", "parameters": deep}], parallel=True)
