"""The events of a running AsyncLLM for the pages that watch it, and their pause button."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING

from nanovllm.engine.observer import Event, observe, unobserve
from nanovllm.inspector.record import encode

if TYPE_CHECKING:
    from nanovllm.async_llm import AsyncLLM

ACTIONS = ("pause", "resume", "step")
MAX_STEPS = 1000  # of one "step"
_INTERVAL = 0.05  # seconds between messages: the steps in between share one
_HEARTBEAT = 5.0  # seconds without events after which a comment is sent, so that a reader that is gone is noticed
_MAX_PENDING = 4096  # events; a reader that is slower gets a snapshot instead


class NobodyWatches(Exception):
    """The engine is only held while a page is open, which would let it go again when it leaves."""


class _Viewer:
    """A sink that keeps the events of one reader until they are sent."""

    def __init__(self) -> None:
        self.pending: deque[Event] = deque()
        self.has_lost = False

    def __call__(self, event: Event) -> None:
        if self.has_lost:
            return
        self.pending.append(event)
        if len(self.pending) > _MAX_PENDING:
            self.has_lost = True

    def take(self) -> list[Event]:
        return [self.pending.popleft() for _ in range(len(self.pending))]


class Live:
    """All readers of one engine. The engine is observed while there is one, and paused at most so long.

    Methods are for one event loop. `interval` is the time between two messages to a reader, in seconds.
    """

    def __init__(self, llm: AsyncLLM, interval: float = _INTERVAL) -> None:
        self._llm, self._interval = llm, interval
        self._viewers: set[_Viewer] = set()
        self._is_closed = False
        self.is_paused = False

    @property
    def num_viewers(self) -> int:
        return len(self._viewers)

    def close(self) -> None:
        """Ends every events() soon, and a pause: for a server that stops."""
        self._is_closed = True
        self._resume()

    async def events(self) -> AsyncIterator[str]:
        """Messages of server-sent events: lists of events, the first of them a snapshot. Ends with the engine."""
        viewer = _Viewer()
        self._viewers.add(viewer)
        try:
            viewer.pending.append(self._control())
            await self._in_engine(observe, viewer)
            quiet = 0.0
            while not self._is_closed and self._llm.is_running:
                if viewer.has_lost:
                    await self._start_again(viewer)
                events = viewer.take()
                quiet = 0.0 if events else quiet + self._interval
                if events:
                    yield f"data: [{','.join(map(encode, events))}]\n\n"
                elif quiet >= _HEARTBEAT:
                    quiet = 0.0
                    yield ": still here\n\n"
                await asyncio.sleep(self._interval)
            yield 'data: [{"kind":"end"}]\n\n'
        finally:
            self._viewers.discard(viewer)
            with contextlib.suppress(RuntimeError):  # the engine was shut down: nothing is observed any more
                self._llm.call(lambda: unobserve(self._llm.engine, viewer))
            if not self._viewers:
                self._resume()

    async def control(self, action: str, num_steps: int = 1) -> bool:
        """Pauses, resumes, or lets the paused engine make some steps ("step" pauses a running one); is it paused now?

        Raises:
            ValueError: the action or the number of steps is not allowed. NobodyWatches: no page is open. RuntimeError:
            the engine was shut down.
        """
        if action not in ACTIONS:
            raise ValueError(f"action: expected one of {', '.join(ACTIONS)}, got {action!r}")
        if not 1 <= num_steps <= MAX_STEPS:
            raise ValueError(f"steps: expected 1 to {MAX_STEPS}, got {num_steps}")
        if action == "resume":
            self._resume()
            return False
        if not self._viewers:
            raise NobodyWatches("the engine can be paused while the inspector is open; nobody has opened it")
        if not self.is_paused:
            self.is_paused = True
            self._llm.set_paused(True)
            self._tell()
        elif action == "step":
            self._llm.step_paused(num_steps)
        return True

    def _resume(self) -> None:
        if not self.is_paused:
            return
        self.is_paused = False
        with contextlib.suppress(RuntimeError):
            self._llm.set_paused(False)
        self._tell()

    def _control(self) -> Event:
        return {"kind": "control", "paused": self.is_paused}

    def _tell(self) -> None:
        for viewer in self._viewers:
            viewer.pending.append(self._control())

    async def _in_engine(self, function, viewer: _Viewer) -> None:
        engine = self._llm.engine
        await asyncio.wrap_future(self._llm.call(lambda: function(engine, viewer)))

    async def _start_again(self, viewer: _Viewer) -> None:
        """A reader that was too slow: the events that it has missed give way to a snapshot."""

        def start_again(engine, viewer: _Viewer) -> None:
            viewer.pending.clear()
            viewer.has_lost = False
            unobserve(engine, viewer)
            observe(engine, viewer)

        await self._in_engine(start_again, viewer)
        viewer.pending.appendleft(self._control())
