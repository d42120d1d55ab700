"""The state of an engine, built from its events: what the page shows, in Python.

`page/state.js` does the same in the browser; both follow nanovllm/engine/observer.py, and the tests hold all three to
each other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.engine.observer import Event


@dataclass(slots=True)
class SequenceView:
    """A sequence as the events tell of it; num_cached: tokens whose K/V is in its blocks."""

    seq_id: int
    name: str
    num_prompt_tokens: int
    max_length: int
    token_ids: list[int]
    block_table: list[int] = field(default_factory=list)
    num_cached: int = 0
    state: str = "waiting"  # "running", "ended"
    reason: str | None = None


@dataclass(slots=True)
class BlockContent:
    """What a hashed block holds; is_published: the hash map leads to it."""

    hash: str
    parent_hash: str | None
    token_ids: list[int]
    is_published: bool


def checked_number(value: Any) -> Any:
    """The value, which has to be a number; else TypeError: a recording may say anything."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"expected a number, got {value!r}")
    return value


class View:
    """apply() every event in order; then look.

    Attributes:
        seqs: every sequence that waits, runs or holds blocks, by id.
        waiting, running: their ids, next or oldest first.
        owners: block id to the ids of the sequences whose table contains it; absent: free.
        contents: block id to what it holds, of blocks with a hash; hash_to_block_id as in the block manager.
        next_free: the first free blocks.
        batch: decoding ids and [id, start, end] chunks of the newest step.
        num_steps, num_preemptions, num_tokens, num_ended: counts since the snapshot (preemptions: since the engine's
            start). num_prefix_tokens of num_admitted_tokens came from the prefix cache.
    """

    def __init__(self) -> None:
        self.num_blocks = self.block_size = 0
        self.model = ""
        self.time = 0.0
        self.num_steps = self.num_preemptions = self.num_tokens = self.num_ended = 0
        self.num_prefix_tokens = self.num_admitted_tokens = 0
        self._decodes: list[int] = []
        self._updated: list[int] = []
        self._clear()

    def _clear(self) -> None:
        self.seqs: dict[int, SequenceView] = {}
        self.waiting: list[int] = []
        self.running: list[int] = []
        self.owners: dict[int, list[int]] = {}
        self.contents: dict[int, BlockContent] = {}
        self.hash_to_block_id: dict[str, int] = {}
        self.next_free: list[int] = []
        self.batch: tuple[list[int], list[list[int]]] = ([], [])

    def apply(self, event: Event) -> None:
        """Takes in one event; those of a kind that is not known here change nothing.

        Raises:
            KeyError, ValueError, TypeError, IndexError: the event does not fit the ones before, or is none.
        """
        self.time = checked_number(event.get("time", self.time))
        if event["kind"] == "snapshot":
            self._restore(event)
        for name, *args in event.get("ops", ()):
            _OPS[name](self, *args)
        self.num_steps += event["kind"] == "step"

    def _restore(self, event: Event) -> None:
        self._clear()
        self.model, self.next_free = event["model"], list(event["next"])
        self.num_blocks, self.block_size = checked_number(event["num_blocks"]), checked_number(event["block_size"])
        self.num_preemptions = checked_number(event["num_preemptions"])
        for s in event["seqs"]:
            seq = SequenceView(s["id"], s["name"], s["prompt"], s["limit"], list(s["tokens"]))
            seq.num_cached, seq.state, seq.reason = s["cached"], s["state"], s["reason"]
            self.seqs[seq.seq_id] = seq
            self._take(seq, s["table"])
            if seq.state != "ended":
                (self.running if seq.state == "running" else self.waiting).append(seq.seq_id)
        for block_id, hash_, parent, token_ids, is_published in event["blocks"]:
            self.contents[block_id] = BlockContent(hash_, parent, token_ids, bool(is_published))
            if is_published:
                self.hash_to_block_id[hash_] = block_id

    def _take(self, seq: SequenceView, block_ids: list[int]) -> None:
        seq.block_table += block_ids
        for block_id in block_ids:
            self.owners.setdefault(block_id, []).append(seq.seq_id)

    def _repurpose(self, block_ids: list[int]) -> None:
        """Blocks that get a new content lose the old one."""
        for block_id in block_ids:
            content = self.contents.pop(block_id, None)
            if content is not None and content.is_published:
                del self.hash_to_block_id[content.hash]

    # Operations, as nanovllm/engine/observer.py lists them

    def _add(self, seq_id: int, name: str, token_ids: list[int], max_length: int) -> None:
        self.seqs[seq_id] = SequenceView(seq_id, name, len(token_ids), max_length, list(token_ids))
        self.waiting.append(seq_id)

    def _admit(self, seq_id: int, block_table: list[int], num_cached_blocks: int) -> None:
        seq = self.seqs[seq_id]
        self.waiting.remove(seq_id)
        self.running.append(seq_id)
        self._repurpose(block_table[num_cached_blocks:])
        self._take(seq, block_table)
        seq.state, seq.num_cached = "running", num_cached_blocks * self.block_size
        self.num_prefix_tokens += seq.num_cached
        self.num_admitted_tokens += len(seq.token_ids)

    def _grow(self, seq_id: int, block_ids: list[int]) -> None:
        self._repurpose(block_ids)
        self._take(self.seqs[seq_id], block_ids)

    def _launch(self, decodes: list[int] | None, chunks: list[list[int]]) -> None:
        if decodes is not None:
            self._decodes = decodes
        self.batch = (self._decodes, chunks)

    def _cached(self, seq_id: int, count: int) -> None:
        if seq_id in self.seqs:  # it may have ended meanwhile
            self.seqs[seq_id].num_cached = count

    def _tokens(self, seq_ids: list[int] | None, token_ids: list[int]) -> None:
        if seq_ids is not None:
            self._updated = seq_ids
        self.num_tokens += len(token_ids)
        for seq_id, token_id in zip(self._updated, token_ids):
            seq = self.seqs.get(seq_id)
            if seq is None:
                continue
            seq.token_ids.append(token_id)
            if seq.state == "running":
                seq.num_cached = len(seq.token_ids) - 1

    def _hash(self, seq_id: int, start: int, hashes: list[str]) -> None:
        seq, size = self.seqs[seq_id], self.block_size
        parent = self.contents[seq.block_table[start - 1]].hash if start else None
        for i, hash_ in enumerate(hashes, start):
            block_id = seq.block_table[i]
            is_new = self.hash_to_block_id.setdefault(hash_, block_id) == block_id
            self.contents[block_id] = BlockContent(hash_, parent, seq.token_ids[i * size : (i + 1) * size], is_new)
            parent = hash_

    def _preempt(self, seq_id: int) -> None:
        self.running.remove(seq_id)
        self.waiting.insert(0, seq_id)
        self.seqs[seq_id].state = "waiting"
        self.num_preemptions += 1

    def _end(self, seq_id: int, reason: str) -> None:
        seq = self.seqs[seq_id]
        (self.running if seq.state == "running" else self.waiting).remove(seq_id)
        seq.state, seq.reason = "ended", reason
        self.num_ended += 1
        if not seq.block_table:
            del self.seqs[seq_id]

    def _free(self, seq_id: int) -> None:
        seq = self.seqs.get(seq_id)
        if seq is None:
            return
        for block_id in seq.block_table:
            owners = self.owners[block_id]
            owners.remove(seq_id)
            if not owners:
                del self.owners[block_id]
        seq.block_table, seq.num_cached = [], 0
        if seq.state == "ended":
            del self.seqs[seq_id]

    def _next(self, block_ids: list[int]) -> None:
        self.next_free = block_ids


_OPS: dict[str, Callable[..., None]] = {
    "add": View._add,
    "admit": View._admit,
    "grow": View._grow,
    "launch": View._launch,
    "cached": View._cached,
    "tokens": View._tokens,
    "hash": View._hash,
    "preempt": View._preempt,
    "end": View._end,
    "free": View._free,
    "next": View._next,
}
