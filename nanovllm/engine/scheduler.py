"""Continuous batching: every step decodes all running sequences and fills the token budget with prompt chunks."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Sequence as Seq
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import Batch, Chunk
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence, SequenceStatus


class Scheduler:
    """Decides which sequences run in a step, and takes in what the step gave.

    Rules: running sequences decode first, one token each, so new prompts never delay them; the rest of the budget goes
    to prompts, oldest first, in chunks where needed. A sequence that needs a block when none is free preempts the
    youngest running one, which later recomputes its tokens; preempted ones resume before new arrivals. At most
    min(max_num_seqs, max_num_batched_tokens) sequences run.

    With a step in flight, schedule() is called before the postprocess() of the step before: sequences then carry a
    pending token. A sequence that turns out to have ended keeps blocks and row until the steps in flight that contain
    it are collected (`draining` counts those).
    """

    def __init__(self, config: EngineConfig, num_blocks: int) -> None:
        self.max_num_batched_tokens = config.max_num_batched_tokens
        self.max_model_len = config.max_model_len
        self.block_manager = BlockManager(num_blocks, config.kvcache_block_size, config.enable_prefix_caching)
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # oldest first
        self.num_rows = config.max_running
        self.free_rows = list(range(self.num_rows))  # a heap: the lowest row first
        self.draining = 0
        self.num_preemptions = 0
        self.journal: list[tuple[Any, ...]] | None = None  # of an observer, as the block manager's

    @property
    def has_work(self) -> bool:
        return bool(self.waiting or self.running or self.draining)

    def check_fits(self, num_prompt_tokens: int) -> None:
        """Raises ValueError for a prompt that can never run, with both numbers."""
        if num_prompt_tokens < 1:
            raise ValueError("prompt is empty: expected at least 1 token, got 0")
        if num_prompt_tokens >= self.max_model_len:
            raise ValueError(
                f"prompt of {num_prompt_tokens} tokens leaves no room for output: expected fewer than max_model_len = "
                f"{self.max_model_len} tokens"
            )
        blocks, size = len(self.block_manager.blocks), self.block_manager.block_size
        needed = -(-num_prompt_tokens // size)
        if needed > blocks:
            raise ValueError(
                f"prompt of {num_prompt_tokens} tokens needs {needed} KV-cache blocks of {size} tokens, the pool has "
                f"{blocks} (set num_kvcache_blocks or kv_cache_memory_bytes)"
            )

    def add(self, seq: Sequence) -> None:
        self.check_fits(len(seq.token_ids))
        self.waiting.append(seq)

    def schedule(self) -> Batch:
        """The next step's work; an empty batch when nothing can run now."""
        batch = Batch()
        budget = self.max_num_batched_tokens
        prefilling = self._schedule_decodes(batch)
        budget -= len(batch.decodes)
        for seq in prefilling:
            if budget == 0:
                break
            budget -= self._add_chunk(batch, seq, budget)
        if not batch.preempted:
            while self.waiting and budget and self.free_rows and self._admit(self.waiting[0]):
                budget -= self._add_chunk(batch, self.running[-1], budget)
        num_used = self.num_rows - len(self.free_rows)
        if batch and num_used and self.free_rows and self.free_rows[0] < num_used:
            self._close_gaps(batch, num_used)
        return batch

    def _close_gaps(self, batch: Batch, num_used: int) -> None:
        """Moves sequences from rows >= num_used into free ones below: a decode step costs as much as its highest row.

        An ended sequence stays where it is until its steps in flight are collected.
        """
        for seq in self.running:
            if seq.row >= num_used:
                row = heapq.heapreplace(self.free_rows, seq.row)
                batch.moves.append((seq.row, row))
                seq.row, seq.num_synced_blocks = row, 0

    def _schedule_decodes(self, batch: Batch) -> list[Sequence]:
        """Fills batch.decodes; returns the running sequences whose prompt is not wholly launched."""
        running, block_manager, block_size = self.running, self.block_manager, self.block_manager.block_size
        decodes, ends = batch.decodes, batch.decode_ends
        prefilling = []
        i = 0
        while i < len(running):
            seq = running[i]
            i += 1
            if seq.num_launched_tokens < seq.num_prefill_tokens:
                prefilling.append(seq)
                continue
            length = len(seq.token_ids) + seq.num_pending
            if seq.num_pending and (length >= seq.max_length or seq.waits_for_tokens):
                continue  # its pending token ends it, or is needed on the host first
            if length > len(seq.block_table) * block_size:
                while not block_manager.can_append(seq) and len(running) > i:
                    batch.preempted.append(self.preempt(running[-1]))
                if not block_manager.can_append(seq):
                    self._yield_blocks(batch, seq)
                    continue
                block_manager.may_append(seq)
            seq.num_scheduled_tokens = 1
            seq.num_launched_tokens = length
            seq.num_pending += 1
            seq.num_in_flight += 1
            decodes.append(seq)
            ends.append(length)
        return prefilling

    def _yield_blocks(self, batch: Batch, seq: Sequence) -> None:
        """seq is the youngest and the pool is full: wait for blocks on their way, step back, or end."""
        if self.draining:
            return
        if len(self.running) > 1:
            batch.preempted.append(self.preempt(seq))
        elif not seq.num_pending:  # alone, and the pool cannot hold its next token
            self.finish(seq, "length")
            batch.finished.append(seq)

    def _admit(self, seq: Sequence) -> bool:
        num_cached_blocks = self.block_manager.can_allocate(seq)
        if num_cached_blocks < 0:
            return False
        self.waiting.popleft()
        self.block_manager.allocate(seq, num_cached_blocks)
        seq.num_launched_tokens = seq.num_cached_tokens
        seq.num_prefill_tokens = len(seq.token_ids)
        if seq.num_prefix_tokens < 0:
            seq.num_prefix_tokens = seq.num_cached_tokens
        seq.row = heapq.heappop(self.free_rows)
        seq.status = SequenceStatus.RUNNING
        self.running.append(seq)
        return True

    def _add_chunk(self, batch: Batch, seq: Sequence, budget: int) -> int:
        start = seq.num_launched_tokens
        end = min(seq.num_prefill_tokens, start + budget)
        is_last = end == seq.num_prefill_tokens
        batch.chunks.append(Chunk(seq, start, end, is_last))
        seq.num_scheduled_tokens = end - start
        seq.num_launched_tokens = end
        seq.num_pending += is_last
        seq.num_in_flight += 1
        return end - start

    def prepare_collect(self, batch: Batch) -> None:
        """What postprocess can do of a launched step before its results are there: hashes of the prompts' blocks."""
        manager = self.block_manager
        if manager.enable_prefix_caching:
            for chunk in batch.chunks:
                manager.compute_hashes(chunk.seq, chunk.end // manager.block_size)

    def postprocess(self, batch: Batch, token_ids: Seq[int]) -> tuple[list[Sequence], list[Sequence]]:
        """Takes in a finished step: publishes full blocks, appends the sampled tokens, ends sequences.

        token_ids are those of batch.sampled, in order. Returns (sequences that got a token, sequences that ended).
        """
        updated: list[Sequence] = []
        finished: list[Sequence] = []
        hash_blocks, block_size = self.block_manager.hash_blocks, self.block_manager.block_size
        for seq, end, token_id in zip(batch.decodes, batch.decode_ends, token_ids):
            if seq.finish_reason is None and not seq.is_stale:  # the common case, kept short
                seq.num_in_flight -= 1
                seq.num_cached_tokens = end
                if end % block_size == 0:
                    hash_blocks(seq, end - 1, end)
            elif not self._collect_stopped(seq):
                continue
            self._append(seq, token_id, updated, finished)
        sampled = iter(token_ids[len(batch.decodes) :])
        for chunk in batch.chunks:
            seq = chunk.seq
            token_id = next(sampled) if chunk.is_last else None
            if seq.finish_reason is None and not seq.is_stale:
                seq.num_in_flight -= 1
                hash_blocks(seq, chunk.start, chunk.end)
                seq.num_cached_tokens = chunk.end
            elif not self._collect_stopped(seq):
                continue
            if token_id is not None:
                self._append(seq, token_id, updated, finished)
        return updated, finished

    def _collect_stopped(self, seq: Sequence) -> bool:
        """A step of a sequence that ended or was preempted meanwhile; True: its token still counts."""
        seq.num_in_flight -= 1
        if seq.finish_reason is None:
            seq.is_stale = False
            return True
        if seq.num_in_flight == 0:
            self.draining -= 1
            self._release(seq)
        return False

    def _append(self, seq: Sequence, token_id: int, updated: list[Sequence], finished: list[Sequence]) -> None:
        seq.token_ids.append(token_id)
        seq.num_pending -= 1
        updated.append(seq)
        if token_id in seq.eos_token_ids:
            seq.stop_reason = token_id if token_id in (seq.params.stop_token_ids or ()) else None
            self.finish(seq, "stop")
        elif len(seq.token_ids) >= seq.max_length:
            self.finish(seq, "length")
        else:
            return
        finished.append(seq)

    def preempt(self, seq: Sequence) -> Sequence:
        """Takes seq's blocks and row and puts it at the head of the waiting queue; its tokens are recomputed later."""
        self.running.remove(seq)
        if self.journal is not None:
            self.journal.append(("preempt", seq.seq_id))
        seq.is_stale = seq.num_in_flight > 0
        self._release(seq)
        seq.reset_progress()
        seq.status = SequenceStatus.WAITING
        self.waiting.appendleft(seq)
        self.num_preemptions += 1
        return seq

    def finish(self, seq: Sequence, reason: str) -> None:
        """Ends seq with reason "stop", "length" or "abort"; ending it again changes nothing."""
        if seq.finish_reason is not None:
            return
        seq.finish_reason = reason
        if self.journal is not None:
            self.journal.append(("end", seq.seq_id, reason))
        if seq.status is SequenceStatus.RUNNING:
            self.running.remove(seq)
            if seq.num_in_flight:
                self.draining += 1
            else:
                self._release(seq)
        else:
            self.waiting.remove(seq)
            if seq.num_in_flight:  # preempted while in flight: it holds nothing, but a step will still report it
                self.draining += 1
        seq.status = SequenceStatus.FINISHED

    def _release(self, seq: Sequence) -> None:
        self.block_manager.deallocate(seq)
        if seq.row >= 0:
            heapq.heappush(self.free_rows, seq.row)
            seq.row = -1
