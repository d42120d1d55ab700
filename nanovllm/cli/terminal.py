"""What a conversation on a terminal needs: lines with history, and answers as Markdown while they come."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence

from rich.console import Console
from rich.live import Live
from rich.markdown import Markdown
from rich.text import Text

FENCE = '"""'  # begins and ends a message of several lines
# All control characters but tab and newline: an answer must not move the cursor or rename the window.
_CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_REFRESH = 0.05  # seconds between two looks at an unfinished block
_CODE_FENCE = re.compile(r" {0,3}(`{3,}|~{3,})")


def is_interactive() -> bool:
    """Whether a person types and reads; a stream that was closed before the start is None."""
    return all(s is not None and s.isatty() for s in (sys.stdin, sys.stdout))


def use_line_editing(commands: Sequence[str]) -> None:
    """Gives input() history with the arrow keys, and completion of commands with Tab."""
    try:
        import readline
    except ImportError:  # a Python without it: plain lines
        return

    def complete(text: str, state: int) -> str | None:
        matches = [f"{c} " for c in commands if c.startswith(text)] if text.startswith("/") else []
        return matches[state] if state < len(matches) else None

    readline.set_completer_delims(" \n")
    readline.set_completer(complete)
    readline.parse_and_bind("tab: complete")


def read_message(prompt: str, continuation: str) -> str:
    '''One message: a line, lines that end with a backslash and the next one, or all between two """.

    Raises:
        EOFError: the input is over. KeyboardInterrupt: Ctrl-C, which drops what was typed.
    '''
    if sys.stdin is None:
        raise EOFError
    line = input(prompt)
    if line.lstrip().startswith(FENCE):
        line = line.lstrip().removeprefix(FENCE)
        lines = []
        while not line.rstrip().endswith(FENCE):
            lines.append(line)
            try:
                line = input(continuation)
            except EOFError:  # the end of the input ends the message too
                return "\n".join(lines).strip()
        return "\n".join([*lines, line.rstrip().removesuffix(FENCE)]).strip()
    lines = []
    while line.endswith("\\"):
        lines.append(line[:-1])
        try:
            line = input(continuation)
        except EOFError:
            return "\n".join(lines).strip()
    return "\n".join([*lines, line]).strip()


class MarkdownPrinter:
    """Renders Markdown that comes in pieces: whole blocks at once, the unfinished one as plain text until it is whole.

    A context manager; show() takes the pieces.
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(highlight=False)
        self._pending = ""
        self._next_refresh = 0.0
        self._live = Live(console=self._console, transient=True, auto_refresh=False, vertical_overflow="crop")

    def __enter__(self) -> MarkdownPrinter:
        self._live.start()
        return self

    def __exit__(self, *exc: object) -> None:
        block, self._pending = self._pending, ""
        self._live.update(Text(""))
        self._live.stop()
        self._print(block)

    def show(self, text: str) -> None:
        self._pending += printable(text)
        block, self._pending = split_blocks(self._pending)
        if block:
            self._live.update(Text(""), refresh=True)
            self._print(block)
        now = time.monotonic()
        if not block and now < self._next_refresh:
            return
        self._next_refresh = now + _REFRESH
        # The tail fits on the screen, or it could not be taken back.
        room, width = max(1, self._console.height - 2), max(1, self._console.width - 1)
        lines = Text(self._pending[-room * width :]).wrap(self._console, width)
        self._live.update(Text("\n").join(lines[-room:]), refresh=True)

    def _print(self, block: str) -> None:
        if block.strip():
            self._console.print(Markdown(block.strip("\n")))
            if not block.endswith("\n\n"):
                return
            self._console.print()


def printable(text: str) -> str:
    """text without control characters, other than tab and newline."""
    return _CONTROLS.sub("", text)


def split_blocks(text: str) -> tuple[str, str]:
    """Whole Markdown blocks, and the rest, which may still grow.

    A blank line ends a block once the line after it has begun, at the left margin (an indented one goes on in a list),
    unless a code fence is open.
    """
    end = 0
    fence = ""
    is_after_blank = False
    position = 0
    for line in text.splitlines(keepends=True):
        if not fence and is_after_blank and line[0] not in " \t\n":
            end = position
        opening = _CODE_FENCE.match(line)
        if fence:
            closing = line.strip()
            if closing.startswith(fence) and set(closing) == {fence[0]}:
                fence = ""
        elif opening:
            fence = opening[1]
        is_after_blank = not line.strip()
        position += len(line)
    return text[:end], text[end:]
