"""The file of --chat-template, checked without a model."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, TemplateSyntaxError
from jinja2.ext import Extension
from jinja2.nodes import Node
from jinja2.parser import Parser


class _Generation(Extension):
    """The tag with which templates mark the assistant's tokens; transformers knows it, Jinja does not."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> list[Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


def read_template(path: str) -> str:
    """The template; ValueError when the file is no text, or no Jinja."""
    try:
        text = Path(path).read_text(encoding="utf-8")
        Environment(extensions=["jinja2.ext.loopcontrols", _Generation]).parse(text)
    except UnicodeDecodeError as e:
        raise ValueError(f"chat_template: expected UTF-8, got byte 0x{e.object[e.start]:02x} in {path!r}") from None
    except TemplateSyntaxError as e:
        raise ValueError(f"chat_template: expected a Jinja template, got {path!r}, line {e.lineno}: {e}") from None
    return text
