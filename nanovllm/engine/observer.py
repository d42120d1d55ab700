"""What an engine tells those who watch it: one small event a step, with what changed since the event before.

Nobody watches: `engine.observer` is None, and so are the journals, which is all that a step looks at. Somebody does:
scheduler and block manager write their changes down, the engine says when each phase of a step was over, and every
sink gets the same events. An event is a dict of lists, strings and numbers, fit for JSON, and nobody changes it later:

- {"kind": "snapshot", ...}: the whole state, as `Observer.snapshot` describes it; the first event of every sink.
- {"kind": "step", "step": n, "time": s, "us": [schedule, launch, wait, collect], "done": [m, device_us], "ops": [...]}:
  step n was launched at time s (seconds since the observer began) and step m collected. "us" are whole microseconds of
  the engine's thread; device_us is None where the device is not timed. No "done": nothing was collected; "step" is
  None: nothing was launched, which took in the last step in flight.
- {"kind": "change", "time": s, "ops": [...]}: requests came or went between two steps.

ops, in the order in which they happened; sequences and blocks are named by their ids:

- ("add", seq, name, prompt token ids, max_length): it waits, behind all others.
- ("admit", seq, block table, number of leading blocks from the prefix cache): it runs, as the youngest.
- ("grow", seq, new block ids): its table got longer. New blocks of "admit" and "grow" lose their old content.
- ("launch", decoding seqs, [[seq, start, end], ...]): the batch. None for the decoding ones: the same as last time.
- ("cached", seq, n): the K/V of its first n tokens is there; said of prompts.
- ("tokens", seqs, token ids): each got one. None for the seqs: the same as last time. A running one has then the K/V of
  all its tokens but the last.
- ("hash", seq, i, hashes): its full logical blocks from i on are hashed, and published where their hash is new.
- ("preempt", seq): it waits again, in front of all others, without K/V.
- ("end", seq, reason): it is finished; it holds its blocks until "free".
- ("free", seq): its blocks were released.
- ("next", block ids): the first of the free blocks, in the order in which they will be taken.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice, pairwise
from time import perf_counter
from typing import TYPE_CHECKING, Any

from nanovllm.engine.sequence import Sequence

if TYPE_CHECKING:
    from nanovllm.engine.batch import Batch
    from nanovllm.engine.llm_engine import LLMEngine

Event = dict[str, Any]
Sink = Callable[[Event], None]  # called in the engine's thread: keep it short, and let nothing out of it

_NUM_NEXT = 8  # free blocks that are shown


def observe(engine: LLMEngine, sink: Sink) -> None:
    """sink gets a snapshot now and then every event. Call it in the thread that steps the engine, between two steps."""
    if engine.observer is None:
        engine.observer = Observer(engine)
    engine.observer.add_sink(sink)


def unobserve(engine: LLMEngine, sink: Sink) -> None:
    """Ends what observe() began; after the last sink the engine pays nothing any more. Same thread as observe()."""
    observer = engine.observer
    if observer is not None and observer.remove_sink(sink):
        engine.observer = None


class Observer:
    """The one observer of an engine; it hands its events to any number of sinks."""

    def __init__(self, engine: LLMEngine) -> None:
        self._engine = engine
        self._sinks: list[Sink] = []
        self._ops: list[tuple[Any, ...]] = []
        self._start = perf_counter()
        self._times: list[float] = []  # of the step in progress: its start, and the end of each phase
        self._launched_now = False
        self._done: list[int | None] | None = None
        self._chunks: list[Any] = []  # of the batch that this step collected
        self._last_decodes: list[Sequence] | None = None
        self._last_updated: list[Sequence] | None = None
        self._last_next: list[int] | None = None
        self._num_launched = len(engine._in_flight)  # steps are numbered from the oldest one in flight
        self._num_collected = 0
        self._connect(self._ops)

    def _connect(self, journal: list[tuple[Any, ...]] | None) -> None:
        scheduler = self._engine.scheduler
        scheduler.journal = scheduler.block_manager.journal = journal
        if hasattr(self._engine.runner, "times_steps"):
            self._engine.runner.times_steps = journal is not None

    # Sinks

    def add_sink(self, sink: Sink) -> None:
        self.flush()
        sink(self.snapshot())
        self._sinks.append(sink)
        self._forget_last()

    def remove_sink(self, sink: Sink) -> bool:
        """True: it was the last one, and the engine's journals are closed."""
        if sink in self._sinks:
            self._sinks.remove(sink)
        if self._sinks:
            return False
        self._connect(None)
        return True

    def _emit(self, event: Event) -> None:
        for sink in self._sinks:
            sink(event)

    def _forget_last(self) -> None:
        """The next event says everything in full: a new sink does not know what was said before."""
        self._last_decodes = self._last_updated = self._last_next = None

    def snapshot(self) -> Event:
        """The whole state between two steps.

        num_blocks, block_size; seqs: running ones (oldest first), waiting ones (next first), then ended ones that still
        hold blocks, each {"id", "name", "prompt": its length, "limit", "tokens", "table", "cached", "state", "reason"};
        blocks: [id, hash, parent's hash or None, token ids, 1 if the hash map has it] of each block with a hash.
        """
        engine = self._engine
        scheduler, manager = engine.scheduler, engine.scheduler.block_manager
        in_flight = {s.seq_id: s for batch, _ in engine._in_flight for s in (*batch.decodes, *_seqs(batch.chunks))}
        ended = [s for s in in_flight.values() if s.is_finished and s.block_table]
        return {
            "kind": "snapshot",
            "time": self._now(),
            "model": engine.config.model,
            "num_blocks": len(manager.blocks),
            "block_size": manager.block_size,
            "num_preemptions": scheduler.num_preemptions,
            "seqs": [_described(s) for s in (*scheduler.running, *scheduler.waiting, *ended)],
            "blocks": [
                [b.block_id, _hex(b.hash), _hex(b.parent_hash), b.token_ids, int(manager._is_published(b))]
                for b in manager.blocks
                if b.hash is not None
            ],
            "next": list(islice(manager.free_block_ids, _NUM_NEXT)),
        }

    def _now(self) -> float:
        return round(perf_counter() - self._start, 6)

    # What the engine calls

    def added(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            prompt = seq.token_ids[: seq.num_prompt_tokens]
            self._ops.append(("add", seq.seq_id, _name(seq), prompt, seq.max_length))
        self.flush()

    def flush(self) -> None:
        """Tells what happened outside of steps."""
        if self._ops:
            self._emit({"kind": "change", "time": self._now(), "ops": self._take_ops()})

    def step_begins(self) -> None:
        self._times = [perf_counter()]
        self._done = None
        self._chunks = []

    def scheduled(self, batch: Batch) -> None:
        self._times.append(perf_counter())
        self._launched_now = bool(batch)
        if batch:
            is_same = batch.decodes == self._last_decodes  # the same objects: cheap to compare
            decodes = None if is_same else [s.seq_id for s in batch.decodes]
            chunks = [[c.seq.seq_id, c.start, c.end] for c in batch.chunks]
            self._ops.append(("launch", decodes, chunks))
            self._last_decodes = batch.decodes

    def launched(self) -> None:
        self._times.append(perf_counter())

    def collected(self, batch: Batch, handle: Any) -> None:
        """The oldest step in flight is over on the device, and not yet taken in."""
        self._times.append(perf_counter())
        device_seconds = getattr(handle, "device_seconds", None)
        seconds = device_seconds() if device_seconds is not None else None
        self._done = [self._num_collected, None if seconds is None else round(seconds * 1e6)]
        self._num_collected += 1
        self._chunks = batch.chunks

    def step_ends(self, updated: list[Sequence]) -> None:
        ops = self._ops
        ops += [("cached", c.seq.seq_id, c.seq.num_cached_tokens) for c in self._chunks if not c.is_last]
        if updated:
            ids = None if updated == self._last_updated else [s.seq_id for s in updated]
            ops.append(("tokens", ids, [s.token_ids[-1] for s in updated]))
            self._last_updated = updated
        number = self._num_launched if self._launched_now else None
        event: Event = {"kind": "step", "step": number, "time": 0.0, "us": []}
        if self._done is not None:
            event["done"] = self._done
        elif not ops:
            return
        self._num_launched += self._launched_now
        first_free = list(islice(self._engine.scheduler.block_manager.free_block_ids, _NUM_NEXT))
        if first_free != self._last_next:
            ops.append(("next", first_free))
            self._last_next = first_free
        event["ops"] = self._take_ops()
        start, scheduled, launched, *rest = self._times
        ready = rest[0] if rest else launched
        event["time"] = round(start - self._start, 6)
        ends = (start, scheduled, launched, ready, perf_counter())
        event["us"] = [round((end - begin) * 1e6) for begin, end in pairwise(ends)]
        self._emit(event)

    def restart(self) -> None:
        """A step failed, and the engine has a new scheduler: everything is said again."""
        self._ops.clear()
        self._forget_last()
        self._num_collected = self._num_launched
        self._connect(self._ops)
        self._emit(self.snapshot())

    def _take_ops(self) -> list[tuple[Any, ...]]:
        ops = self._ops.copy()
        self._ops.clear()
        return ops


def _seqs(chunks: list[Any]) -> list[Sequence]:
    return [c.seq for c in chunks]


def _hex(value: int | None) -> str | None:
    return None if value is None or value < 0 else f"{value:032x}"


def _name(seq: Sequence) -> str:
    """The request's id, with the completion's index where there are several."""
    request = getattr(seq.data, "request", None)
    if request is None:
        return str(seq.seq_id)
    return request.request_id if request.params.n == 1 else f"{request.request_id}#{seq.data.index}"  # type: ignore[attr-defined]


def _described(seq: Sequence) -> dict[str, Any]:
    return {
        "id": seq.seq_id,
        "name": _name(seq),
        "prompt": seq.num_prompt_tokens,
        "limit": seq.max_length,
        "tokens": list(seq.token_ids),
        "table": list(seq.block_table),
        "cached": seq.num_cached_tokens,
        "state": "ended" if seq.is_finished else seq.status.name.lower(),
        "reason": seq.finish_reason,
    }
