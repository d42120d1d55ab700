"""A model runner without a model, for tests of the control plane.

The KV pool is a dict, slot -> hash of the tokens up to that position, so a wrong slot, a stale block or a block that
was shared or freed too early is seen as a wrong hash. As in the real runner, a decode's input token comes from device
memory (a row's last sampled token), never from the sequence, because the host may not know it yet.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from nanovllm.config import EngineConfig
from nanovllm.engine.batch import Batch
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence, SequenceStatus
from nanovllm.outputs import Logprob
from nanovllm.sampling_params import SamplingParams

Choose = Callable[[int, Sequence, int], int]  # (hash of all tokens, sequence, position of the new token) -> token


def extend_hash(parent: int, token_id: int) -> int:
    return hash((parent, token_id, 0x9E37))


def by_hash(vocab: int) -> Choose:
    """The pseudo-model next(tokens): any change of an earlier token (or of the seed, if not greedy) changes it."""
    return lambda h, seq, position: hash((h, seq.seed if seq.params.temperature else 0)) % vocab


def scripted(*tokens: int, then: int = 7) -> Choose:
    """Completion tokens in order for every sequence, `then` after them."""
    return lambda h, seq, position: (tokens + (then,) * (position + 1))[position - seq.num_prompt_tokens]


@dataclass
class Handle:
    number: int
    token_ids: list[int]
    logprobs: dict[int, dict[int, Logprob]]


@dataclass
class FakeRunner:
    """Executes a batch when it is launched, and checks everything that the batch promises."""

    num_kvcache_blocks: int
    block_size: int
    choose: Choose = field(default_factory=lambda: by_hash(1000))
    max_tokens: int = 10**9
    pool: dict[int, int] = field(default_factory=dict)  # slot -> hash of tokens 0..position
    last_token_ids: dict[int, int] = field(default_factory=dict)  # row -> token
    prefix_hashes: dict[int, list[int]] = field(default_factory=dict)  # seq_id -> hash of tokens 0..i
    batches: list[Batch] = field(default_factory=list)
    writes: list[list[int]] = field(default_factory=list)  # slots of every step
    on_launch: Callable[[Batch], None] | None = None
    on_collect: Callable[[], None] | None = None
    next_collect: int = 0
    keep: bool = True  # remember batches and writes
    ref_count: Callable[[int], int] | None = None  # of a block, set by make_engine
    block_hash: Callable[[int], int | None] | None = None

    def slot(self, seq: Sequence, position: int) -> int:
        return seq.block_table[position // self.block_size] * self.block_size + position % self.block_size

    def launch(self, batch: Batch) -> Handle:
        if self.on_launch:
            self.on_launch(batch)
        assert batch, "an empty batch reached the model"
        self._move_rows(batch)
        assert batch.num_tokens <= self.max_tokens, f"{batch.num_tokens} tokens scheduled, budget {self.max_tokens}"
        work = [(s, end - 1, end, True) for s, end in zip(batch.decodes, batch.decode_ends, strict=True)]
        work += [(c.seq, c.start, c.end, c.is_last) for c in batch.chunks]
        seqs = [w[0] for w in work]
        assert len({s.seq_id for s in seqs}) == len(seqs), "a sequence is in the batch twice"
        assert len({s.row for s in seqs}) == len(seqs), "two sequences share a row"
        written: list[int] = []
        for i, (seq, start, end, is_last) in enumerate(work):
            is_decode = i < len(batch.decodes)
            self._check_scheduled(seq, start, end, is_last, is_decode)
            tokens = seq.token_ids
            if is_decode:
                token = self.last_token_ids[seq.row]
                assert len(tokens) in (end, end - 1), f"{seq}: decode of position {end - 1}, {len(tokens)} known tokens"
                assert len(tokens) < end or tokens[end - 1] == token, f"{seq}: the device holds another last token"
                tokens = [*tokens[: end - 1], token]
            hashes = self.prefix_hashes.setdefault(seq.seq_id, [])
            for position in range(len(hashes), end):
                hashes.append(extend_hash(hashes[-1] if hashes else 0, tokens[position]))
            for position in range(start, end):
                slot = self.slot(seq, position)
                self._check_write(seq, slot // self.block_size)
                self.pool[slot] = hashes[position]
                written.append(slot)
        assert len(set(written)) == len(written), "two tokens of a step share a slot"
        token_ids: list[int] = []
        logprobs = {}
        for seq, _, end, is_last in work:
            hashes = self.prefix_hashes[seq.seq_id]
            for position in range(end):
                found = self.pool.get(self.slot(seq, position))
                assert found == hashes[position], f"{seq}: wrong K/V at position {position} of a context of {end}"
            if is_last:
                token_id = self.choose(self.pool[self.slot(seq, end - 1)], seq, end)
                if seq.params.logprobs is not None:
                    logprobs[len(token_ids)] = {token_id: Logprob(-float(end), 1)}
                self.last_token_ids[seq.row] = token_id
                token_ids.append(token_id)
        if self.keep:
            self.batches.append(batch)
            self.writes.append(written)
        self._launched = getattr(self, "_launched", 0) + 1
        return Handle(self._launched - 1, token_ids, logprobs)

    def _move_rows(self, batch: Batch) -> None:
        old, new = {a for a, _ in batch.moves}, {b for _, b in batch.moves}
        assert len(old) == len(new) == len(batch.moves) and not old & new, f"moves {batch.moves}"
        self.last_token_ids |= {b: self.last_token_ids[a] for a, b in batch.moves if a in self.last_token_ids}

    def _check_scheduled(self, seq: Sequence, start: int, end: int, is_last: bool, is_decode: bool) -> None:
        assert 0 <= start < end, f"{seq}: scheduled [{start}, {end})"
        assert seq.row >= 0, f"{seq} has no row"
        assert seq.num_scheduled_tokens == end - start, f"{seq}: num_scheduled_tokens {seq.num_scheduled_tokens}"
        assert end < seq.max_length, f"{seq}: asks for a token at {end}, max_length {seq.max_length}"
        if is_decode:
            assert len(seq.block_table) == -(-end // self.block_size), f"{seq}: decode of position {end - 1}"
            assert not seq.waits_for_tokens or len(seq.token_ids) == end, f"{seq}: launched before its token was known"
        else:
            assert end <= len(seq.token_ids) == seq.num_prefill_tokens, f"{seq}: chunk [{start}, {end})"
            assert is_last == (end == seq.num_prefill_tokens), f"{seq}: chunk [{start}, {end}), is_last {is_last}"
            assert len(seq.block_table) == seq.num_blocks, f"{seq}: {seq.num_blocks} blocks needed"

    def _check_write(self, seq: Sequence, block_id: int) -> None:
        if self.ref_count is not None and self.block_hash is not None:
            assert self.ref_count(block_id) == 1, f"{seq} writes block {block_id}, which is free or shared"
            assert self.block_hash(block_id) is None, f"{seq} writes block {block_id}, which is published"

    def check_health(self) -> None:
        """Always well."""

    def close(self) -> None:
        """Nothing to end."""

    def collect(self, handle: Handle) -> tuple[list[int], dict[int, dict[int, Logprob]]]:
        if self.on_collect:
            self.on_collect()
        assert handle.number >= self.next_collect, "steps are collected out of order"
        self.next_collect = handle.number + 1
        return handle.token_ids, handle.logprobs


def make_config(**options: Any) -> EngineConfig:
    """EngineConfig for a fake model; a block size that is not a power of two is let through."""
    size = options.pop("kvcache_block_size", 4)
    config = EngineConfig(model="fake", kvcache_block_size=1, **options)
    object.__setattr__(config, "kvcache_block_size", size)
    return config


def make_engine(
    num_blocks: int = 64,
    choose: Choose | None = None,
    *,
    overlap: bool = False,
    tokenizer: Any = None,
    eos: tuple[int, ...] = (),
    vocab_size: int | None = 1000,
    **options: Any,
) -> LLMEngine:
    """An LLMEngine over a FakeRunner; block size 4 unless the options say otherwise."""
    config = make_config(**options)
    runner = FakeRunner(num_blocks, config.kvcache_block_size, choose or by_hash(1000))
    runner.max_tokens = config.max_num_batched_tokens
    engine = LLMEngine(config, runner, tokenizer, frozenset(eos), vocab_size, overlap)
    runner.ref_count = lambda b: engine.scheduler.block_manager.blocks[b].ref_count
    runner.block_hash = lambda b: engine.scheduler.block_manager.blocks[b].hash
    return engine


def greedy(max_tokens: int, **options: Any) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=max_tokens, **options)


def run_all(engine: LLMEngine, limit: int = 10_000) -> None:
    """Steps until there is no work, checking the invariants after each."""
    for _ in range(limit):
        if not engine.has_work:
            check_idle(engine)
            return
        engine.step()
        check_invariants(engine)
    raise AssertionError(f"still work after {limit} steps: {engine.scheduler.running} {engine.scheduler.waiting}")


def complete(engine: LLMEngine, prompt: list[int], params: SamplingParams) -> Any:
    """The finished RequestOutput of one prompt."""
    request = engine.add_request(prompt, params)
    run_all(engine)
    return engine.output(request)


def expected_tokens(seq: Sequence, choose: Choose, num_slots: int) -> tuple[list[int], str]:
    """What seq must generate alone in a pool of num_slots tokens, and why it ends: from next(tokens) only."""
    h = 0
    for token_id in seq.token_ids[: seq.num_prompt_tokens]:
        h = extend_hash(h, token_id)
    tokens: list[int] = []
    position = seq.num_prompt_tokens
    while True:
        token_id = choose(h, seq, position)
        tokens.append(token_id)
        position += 1
        if token_id in seq.eos_token_ids:
            return tokens, "stop"
        if position >= seq.max_length or position > num_slots:  # the last token needs no slot
            return tokens, "length"
        h = extend_hash(h, token_id)


def live_sequences(engine: LLMEngine) -> list[Sequence]:
    """Sequences that may hold blocks: running ones, and ended ones in steps in flight."""
    seqs = {s.seq_id: s for s in engine.scheduler.running}
    for batch, _ in engine._in_flight:
        seqs |= {s.seq_id: s for s in (*batch.decodes, *(c.seq for c in batch.chunks))}
    return list(seqs.values())


def check_invariants(engine: LLMEngine) -> None:
    """DESIGN's invariants of the scheduler and the block manager, between two steps."""
    scheduler: Scheduler = engine.scheduler
    manager = scheduler.block_manager
    live = live_sequences(engine)
    counts = dict.fromkeys(range(len(manager.blocks)), 0)
    for seq in live:
        assert len(set(seq.block_table)) == len(seq.block_table), f"{seq}: a block twice"
        for block_id in seq.block_table:
            counts[block_id] += 1
    for block in manager.blocks:
        assert block.ref_count == counts[block.block_id], f"{block}: {counts[block.block_id]} live tables"
    free = list(manager.free_block_ids)
    assert len(free) + len(manager.used_block_ids) == len(manager.blocks)
    assert set(free) == {b for b, n in counts.items() if n == 0}
    assert manager.used_block_ids == {b for b, n in counts.items() if n}
    if isinstance(engine.runner, FakeRunner):
        check_map(engine)

    for seq in scheduler.waiting:
        assert seq.status is SequenceStatus.WAITING and not seq.block_table and seq.row == -1, f"{seq} waits"
    for seq in scheduler.running:
        assert seq.status is SequenceStatus.RUNNING and seq.block_table and seq.finish_reason is None, f"{seq} runs"
        assert seq.num_cached_tokens <= seq.num_launched_tokens <= len(seq), f"{seq}: progress"
        assert len(seq.block_table) * manager.block_size >= seq.num_launched_tokens, f"{seq}: blocks"
    max_running = engine.config.max_running
    assert len(scheduler.running) <= max_running
    rows = [s.row for s in live if s.row >= 0]
    assert sorted(rows + scheduler.free_rows) == list(range(max_running)), f"rows {rows}, free {scheduler.free_rows}"
    ended = [s for s in live if s.is_finished]
    assert scheduler.draining == len(ended), f"draining {scheduler.draining}, ended in flight {ended}"


def check_map(engine: LLMEngine) -> None:
    """Every cached block holds what its hash says, in the metadata and in the pool."""
    manager, runner = engine.scheduler.block_manager, engine.runner
    size = manager.block_size
    assert len(manager.hash_to_block_id) <= len(manager.blocks)
    for h, block_id in manager.hash_to_block_id.items():
        assert manager.blocks[block_id].hash == h, f"the map holds {manager.blocks[block_id]} under {h}"
    known = runner.__dict__.setdefault("published", {})
    for block in manager.blocks:
        if block.hash is None:
            continue
        content = tuple(runner.pool.get(s) for s in range(block.block_id * size, (block.block_id + 1) * size))
        if block.hash not in known:
            assert manager.compute_hash(block.token_ids, block.parent_hash) == block.hash, f"{block}"
            known[block.hash] = content  # K/V depend on the tokens of the whole prefix, and so does the hash
        assert known[block.hash] == content, f"{block}: its K/V changed"


def check_idle(engine: LLMEngine) -> None:
    """Nothing is left of any request."""
    scheduler = engine.scheduler
    assert not engine.has_work and not engine.requests and not engine._in_flight
    assert scheduler.draining == 0 and not scheduler.running and not scheduler.waiting
    assert len(scheduler.block_manager.free_block_ids) == len(scheduler.block_manager.blocks)
    assert sorted(scheduler.free_rows) == list(range(engine.config.max_running))


def random_tokens(rng: random.Random, count: int, vocab: int) -> list[int]:
    return [rng.randrange(vocab) for _ in range(count)]
