"""What every step of a run computed, and where its time went."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.llm_engine import LLMEngine

HOST_PHASES = ("schedule", "launch", "wait", "collect")
DEVICE_PHASES = ("device", "idle")


@dataclass(slots=True)
class Step:
    """One step: its work in tokens, and seconds.

    schedule, launch: choosing the batch and enqueueing it (on CPU, computing it); wait: the host blocked until it was
    done; collect: taking its tokens in. device: the GPU on this step; idle: the GPU with nothing to do before it; both
    None where the device is not timed. end: when it was taken in, since the first step began.
    """

    decode_ends: list[int]  # context length of each decoding sequence, its new token included
    chunks: list[tuple[int, int]]  # first and past-the-last position of each prefill chunk
    num_sampled: int
    schedule: float = 0.0
    launch: float = 0.0
    wait: float = 0.0
    collect: float = 0.0
    device: float | None = None
    idle: float | None = None
    end: float = 0.0

    @property
    def kind(self) -> str:
        return "decode" if not self.chunks else "mixed" if self.decode_ends else "prefill"

    @property
    def num_tokens(self) -> int:
        return len(self.decode_ends) + sum(end - start for start, end in self.chunks)


class StepTimes:
    """Stands where an engine's observer stands, before the one that was there, and writes down every step."""

    def __init__(self, next_observer: Any = None) -> None:
        self.steps: list[Step] = []
        self._next = next_observer
        self._in_flight: deque[Step] = deque()
        self._launched: Step | None = None
        self._collected: Step | None = None
        self._first = self._begin = self._after = 0.0
        self._last_start: Any = None  # event at which the device began the step collected last, and how long it took
        self._last_device = 0.0

    def step_begins(self) -> None:
        self._begin = perf_counter()
        self._first = self._first or self._begin
        self._launched = self._collected = None
        if self._next is not None:
            self._next.step_begins()

    def scheduled(self, batch: Batch) -> None:
        self._after = perf_counter()
        if batch:
            chunks = [(c.start, c.end) for c in batch.chunks]
            step = Step(batch.decode_ends, chunks, len(batch.decodes) + sum(c.is_last for c in batch.chunks))
            step.schedule = self._after - self._begin
            self.steps.append(step)
            self._in_flight.append(step)
            self._launched = step
        if self._next is not None:
            self._next.scheduled(batch)

    def launched(self) -> None:
        now = perf_counter()
        if self._launched is not None:
            self._launched.launch = now - self._after
        self._after = now
        if self._next is not None:
            self._next.launched()

    def collected(self, batch: Batch, handle: Any) -> None:
        now = perf_counter()
        step = self._collected = self._in_flight.popleft()
        step.wait = now - self._after
        self._after = now
        start = getattr(handle, "start", None)
        if start is not None:
            step.device = handle.device_seconds()
            if self._last_start is not None:
                between = self._last_start.elapsed_time(start) * 1e-3
                step.idle = max(0.0, between - self._last_device)
            self._last_start, self._last_device = start, step.device
        if self._next is not None:
            self._next.collected(batch, handle)

    def step_ends(self, updated: Any) -> None:
        if self._collected is not None:
            now = perf_counter()
            self._collected.collect = now - self._after
            self._collected.end = now - self._first
        if self._next is not None:
            self._next.step_ends(updated)

    def added(self, seqs: Any) -> None:
        if self._next is not None:
            self._next.added(seqs)

    def flush(self) -> None:
        if self._next is not None:
            self._next.flush()

    def restart(self) -> None:
        self._in_flight.clear()
        if self._next is not None:
            self._next.restart()


@contextmanager
def record_steps(engine: LLMEngine, device: bool) -> Iterator[list[Step]]:
    """Fills the list that it yields with the steps of the engine; `device`: with the GPU's time (two events a step)."""
    before = engine.observer
    times = StepTimes(before)
    engine.observer = times  # type: ignore[assignment]
    was_timed = getattr(engine.runner, "times_steps", None)
    if was_timed is not None:
        engine.runner.times_steps = was_timed or device  # type: ignore[attr-defined]
    try:
        yield times.steps
    finally:
        while engine.has_work:  # the surplus step that is in flight when the last request ends
            engine.step()
        engine.observer = before
        if was_timed is not None:
            engine.runner.times_steps = was_timed  # type: ignore[attr-defined]


def breakdown(steps: Iterable[Step]) -> list[dict[str, Any]]:
    """A row for each kind of step, and one for all: count, mean tokens, and mean microseconds of each phase (the
    device's only where it was timed)."""
    steps = list(steps)
    rows = []
    kinds: list[tuple[str, Callable[[Step], bool]]] = [
        (kind, lambda s, kind=kind: s.kind == kind) for kind in ("prefill", "mixed", "decode")
    ]
    for name, belongs in [*kinds, ("all", lambda s: True)]:
        of_kind = [s for s in steps if belongs(s)]
        if not of_kind:
            continue
        row: dict[str, Any] = {"kind": name, "steps": len(of_kind)}
        row["tokens"] = sum(s.num_tokens for s in of_kind) / len(of_kind)
        for phase in (*HOST_PHASES, *DEVICE_PHASES):
            values = [v for s in of_kind if (v := getattr(s, phase)) is not None]
            if values:
                row[phase] = 1e6 * sum(values) / len(of_kind)
        rows.append(row)
    return rows


def idle_share(steps: Iterable[Step]) -> float | None:
    """The share of the device's time in which it had nothing to do; None where it was not timed."""
    timed = [s for s in steps if s.device is not None]
    idle, busy = sum(s.idle or 0.0 for s in timed), sum(s.device or 0.0 for s in timed)
    return idle / (idle + busy) if timed else None
