"""What pydantic finds wrong with a body, in one line: the field, what it takes, and what it got."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

_MAX_SHOWN = 60  # characters of a value
_KINDS = {
    "string_type": "a string",
    "string_unicode": "text without lone surrogates",
    "int_type": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
    "missing": "this field",
}
_BOUNDS = {"greater_than": (">", "gt"), "greater_than_equal": (">=", "ge"), "less_than_equal": ("<=", "le")}


def described(value: Any) -> str:
    """A value of JSON in a few characters."""
    if isinstance(value, (list, dict)):
        return "a list" if isinstance(value, list) else "an object"
    text = json.dumps(value[:_MAX_SHOWN] if isinstance(value, str) else value)
    return text if isinstance(value, str) or len(text) <= _MAX_SHOWN else f"{text[:_MAX_SHOWN]}..."


def explain(problems: Sequence[dict[str, Any]]) -> tuple[str, str | None]:
    """One line for the client, and the field that it is about, if any; problems: pydantic's errors() of a body."""
    # All branches of a union complain. What the client meant is the one that has the right type, and the deepest.
    problem = max(problems, key=lambda p: (not _lacks_all(p), not p["type"].endswith("_type"), len(p["loc"])))
    where = _where(problem["loc"])
    text = str(problem["msg"]).removeprefix("Value error, ")
    expected = "a JSON object" if where is None and problem["type"] in _KINDS else _expected(problem)
    if expected is not None:
        if where and (problem["type"].endswith("_type") or problem["type"] == "literal_error"):
            others = [_KINDS.get(p["type"]) for p in problems if _where(p["loc"]) == where]
            expected = " or ".join(dict.fromkeys([expected, *filter(None, others)]))
        text = f"expected {expected}, got {_got(problem)}"
    return f"{where or 'body'}: {text}", where


def _lacks_all(problem: dict[str, Any]) -> bool:
    """Whether a branch of a union of bodies lacks its main field: then another one was meant."""
    return problem["type"] == "missing" and len(problem["loc"]) == 3 and _is_branch(problem["loc"][1])


def _expected(problem: dict[str, Any]) -> str | None:
    """What the field takes; None: the problem's own text says so."""
    kind, limits = problem["type"], problem.get("ctx", {})
    if kind in _BOUNDS:
        sign, name = _BOUNDS[kind]
        bound = limits[name]
        return f"a number {sign} {int(bound) if bound == int(bound) else bound}"
    if kind == "literal_error":
        return limits["expected"]
    if kind == "too_short":
        return f"at least {_items(limits['min_length'])}"
    if kind == "too_long":
        return f"at most {_items(limits['max_length'])}"
    if kind == "string_too_short":
        return f"a string of at least {limits['min_length']} character{'s' * (limits['min_length'] > 1)}"
    if kind == "string_too_long":
        return f"at most {limits['max_length']} characters"
    return _KINDS.get(kind)


def _got(problem: dict[str, Any]) -> str:
    kind = problem["type"]
    if kind in ("missing", "too_short"):
        return "none" if kind == "missing" or not problem["input"] else str(len(problem["input"]))
    return str(len(problem["input"])) if kind in ("too_long", "string_too_long") else described(problem["input"])


def _items(count: int) -> str:
    return f"{count} item{'s' * (count > 1)}"


def _where(location: Sequence[Any]) -> str | None:
    """("body", "messages", 0, "role") to "messages[0].role", without the names of a union's branches."""
    text = ""
    for part in location[1:]:
        if isinstance(part, int):
            text += f"[{part}]"
        elif not _is_branch(part):
            text += f".{part}" if text else part
    return text or None


def _is_branch(part: str) -> bool:
    """Whether a part of a location is a type's name, as of a union's branch: "str", "list[str]", "NamedToolChoice"."""
    return not part.isidentifier() or part in ("str", "int") or part != part.lower()
