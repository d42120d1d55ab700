"""Events of an engine in a file, a JSON object a line: writing and reading."""

from __future__ import annotations

import json
import threading
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from nanovllm import __version__
from nanovllm.engine.observer import Event, observe, unobserve

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM
    from nanovllm.llm import LLM

FORMAT = "nanovllm-trace"
VERSION = 1
_INTERVAL = 0.1  # seconds between writes
_MAX_PENDING = 2048  # events in memory; past it the engine's thread writes, and so waits for the disk


def encode(event: Event) -> str:
    return json.dumps(event, separators=(",", ":"))


class Recorder:
    """A sink that writes events to a file from a thread of its own.

    A write that fails ends the recording, not the engine; close() raises it.

    Raises:
        OSError: the file cannot be opened.
    """

    def __init__(self, path: str | Path) -> None:
        self._path = path
        self._file = open(path, "w", encoding="utf-8")  # noqa: SIM115 - close() closes it
        self._pending: deque[Event] = deque()
        self._lock = threading.Lock()  # of the file
        self._error: OSError | None = None
        self._closing = threading.Event()
        now = datetime.now(timezone.utc).isoformat(timespec="seconds")
        self({"kind": "header", "format": FORMAT, "version": VERSION, "created": now, "nanovllm": __version__})
        self._thread = threading.Thread(target=self._write_loop, name="nanovllm-recorder", daemon=True)
        self._thread.start()

    def __call__(self, event: Event) -> None:
        self._pending.append(event)
        if len(self._pending) >= _MAX_PENDING:
            self._write()

    def _write_loop(self) -> None:
        while not self._closing.wait(_INTERVAL):
            self._write()

    def _write(self) -> None:
        with self._lock:
            try:
                while self._pending:
                    event = self._pending.popleft()
                    if self._error is None:
                        self._file.write(encode(event) + "\n")
                if self._error is None:
                    self._file.flush()
            except OSError as e:
                self._error = e

    def close(self) -> None:
        """Writes what is left; raises the OSError that ended the recording, if one did."""
        self._closing.set()
        self._thread.join()
        self._write()
        try:
            self._file.close()
        except OSError as e:
            self._error = self._error or e
        if self._error is not None:
            self._error.filename = str(self._path)
            raise self._error


@contextmanager
def recording(llm: LLM | AsyncLLM, path: str | Path | None) -> Iterator[None]:
    """Records everything that llm does in the block to a file; nothing where path is None.

    Raises:
        OSError: the file cannot be opened or written.
    """
    if path is None:
        yield
        return
    recorder = Recorder(path)
    engine = llm.engine

    def in_engine(function) -> None:
        call = getattr(llm, "call", None)  # AsyncLLM's engine has a thread of its own
        if call is None:
            function(engine, recorder)
        elif llm.is_running:  # type: ignore[union-attr]
            call(lambda: function(engine, recorder)).result()

    try:
        in_engine(observe)
        yield
    finally:
        in_engine(unobserve)
        recorder.close()


def read(path: str | Path) -> Iterator[Event]:
    """The events of a recording, its header first. A last line that was cut off is left out.

    Raises:
        OSError: the file cannot be read. ValueError: it is no recording, or of a newer version; the text has the line.
    """
    number = 0
    with open(path, encoding="utf-8", errors="replace") as lines:
        for number, line in enumerate(lines, 1):
            try:
                event = json.loads(line)
            except (ValueError, RecursionError) as e:
                if number > 1 and not line.endswith("\n"):
                    return
                raise ValueError(f"{path}: line {number}: expected a JSON object, got {_short(line)}") from e
            if number == 1:
                _check_header(path, event)
            elif not isinstance(event, dict) or "kind" not in event:
                raise ValueError(f"{path}: line {number}: expected an event with a kind, got {_short(line)}")
            yield event
    if number == 0:
        raise ValueError(f"{path}: expected a recording of --record, got an empty file")


def _check_header(path: str | Path, event: object) -> None:
    if not isinstance(event, dict) or event.get("format") != FORMAT:
        raise ValueError(f"{path}: line 1: expected the header of a recording ({FORMAT!r}), got {_short(str(event))}")
    if event.get("version") != VERSION:
        raise ValueError(f"{path}: expected version {VERSION} of the format, got {event.get('version')!r}")


def _short(text: str) -> str:
    text = text.strip()
    return repr(text if len(text) <= 60 else text[:60] + "...")
