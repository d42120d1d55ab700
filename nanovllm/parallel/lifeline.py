"""A worker's connection to rank 0, in a thread: signs of life one way, and the end of rank 0 the other way.

Only the standard library is imported: a worker tells that it lives before it imports torch.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

TICK_SECONDS = 0.25


class Lifeline:
    """Reports to rank 0, and ends this process at once when rank 0 is gone, whatever the main thread waits for.

    Args:
        progress: called for what a sign of life says of this rank's work.
        parent: process id of rank 0, where it started this process.
    """

    def __init__(self, connection: Connection, progress: Callable[[], Any], parent: int | None) -> None:
        self._connection, self._progress, self._parent = connection, progress, parent
        self._lock = threading.Lock()
        self._has_ended = False
        threading.Thread(target=self._watch, name="nanovllm-lifeline", daemon=True).start()

    def report(self, kind: str, *content: Any) -> None:
        """Sends (kind, *content) to rank 0; nothing when it is gone."""
        with self._lock, contextlib.suppress(OSError):
            self._connection.send((kind, *content))

    def end(self) -> None:
        """This rank's work is done: it may outlive rank 0."""
        self._has_ended = True
        self.report("ended")

    def _watch(self) -> None:
        while True:
            with contextlib.suppress(OSError):
                if not self._connection.poll(TICK_SECONDS) and self._parent in (None, os.getppid()):
                    self.report("alive", self._progress())
                    continue
            if self._has_ended:
                return
            os._exit(1)  # rank 0 says nothing after the start: what can be read is its end
