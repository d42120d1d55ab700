"""The inspector's page: one HTML text with everything it needs inside."""

from __future__ import annotations

from functools import cache
from pathlib import Path

_FOLDER = Path(__file__).parent / "page"
_SCRIPTS = ("state", "source", "palette", "pool", "timeline", "sequences", "details", "chat", "app")  # in this order
# What the page may do, for servers: run its own code and styles, and talk to where it came from.
CONTENT_SECURITY_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; connect-src 'self'; img-src data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


def html(trace: str | None = None) -> str:
    """The page. trace: lines of a recording, which it shows; None: it connects to the server that it came from.

    Raises:
        OSError: the package lacks a file of the page.
    """
    page = _page()
    if trace is None:
        return page
    return page.replace("<!-- trace -->", _data("trace", trace))


@cache
def _page() -> str:
    page = _read("index.html")
    page = page.replace("/* style.css */", _read("style.css"))
    page = page.replace("<!-- walkthrough.jsonl -->", _data("walkthrough", _read("walkthrough.jsonl")))
    return page.replace("/* scripts */", "\n".join(_read(f"{name}.js") for name in _SCRIPTS))


def _read(name: str) -> str:
    return (_FOLDER / name).read_text(encoding="utf-8")


def _data(name: str, lines: str) -> str:
    """JSON lines as a block of data that no text in them can end."""
    return f'<script type="application/x-ndjson" id="{name}">\n{lines.replace("<", chr(92) + "u003c")}</script>'
