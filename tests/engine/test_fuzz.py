"""The fuzz of engine/fuzz.py, a share of its seeds; see there for running more. And one of the block manager alone."""

import os
import random

import pytest
from engine.fakes import random_tokens
from engine.fuzz import Case

from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.sequence import Sequence

NUM_SEEDS = int(os.environ.get("NANOVLLM_FUZZ_SEEDS", "600"))
NUM_SLOW_SEEDS = 10_000
PER_TEST = 100


def run_seeds(seeds: range) -> None:
    for seed in seeds:
        try:
            Case(seed).run()
        except Exception as e:
            raise AssertionError(f"seed {seed}: {e}") from e


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, PER_TEST))
def test_engine_equals_next_token_function(first: int) -> None:
    run_seeds(range(first, min(first + PER_TEST, NUM_SEEDS)))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100_000, 100_000 + NUM_SLOW_SEEDS, 1000))
def test_engine_equals_next_token_function_slow(first: int) -> None:
    run_seeds(range(first, first + 1000))


class Model:
    """The block manager's promises by brute force: whole prefixes in place of hashes, counting in place of counters."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self.num_blocks, self.block_size = num_blocks, block_size
        self.tables: dict[int, list[int]] = {}  # live sequence -> blocks
        self.cached: dict[tuple[int, ...], int] = {}  # all tokens up to the end of a computed full block -> its id

    def ref_count(self, block_id: int) -> int:
        return sum(block_id in table for table in self.tables.values())

    def num_free(self) -> int:
        return sum(self.ref_count(b) == 0 for b in range(self.num_blocks))

    def hits(self, tokens: list[int]) -> list[int]:
        ids = []
        for end in range(self.block_size, len(tokens), self.block_size):  # < len: one token is always computed
            if (block_id := self.cached.get(tuple(tokens[:end]))) is None:
                break
            ids.append(block_id)
        return ids

    def can_allocate(self, tokens: list[int]) -> int:
        hits = self.hits(tokens)
        num_new = -(-len(tokens) // self.block_size) - sum(self.ref_count(b) > 0 for b in hits)
        return len(hits) if num_new <= self.num_free() else -1

    def forget(self, block_ids: list[int]) -> None:
        self.cached = {k: b for k, b in self.cached.items() if b not in block_ids}

    def publish(self, seq: Sequence, start: int, end: int) -> None:
        for i in range(start // self.block_size, end // self.block_size):
            self.cached.setdefault(tuple(seq.token_ids[: (i + 1) * self.block_size]), seq.block_table[i])

    def check(self, manager: BlockManager) -> None:
        assert [b.ref_count for b in manager.blocks] == [self.ref_count(b) for b in range(self.num_blocks)]
        free = {b for b in range(self.num_blocks) if self.ref_count(b) == 0}
        assert set(manager.free_block_ids) == free
        assert manager.used_block_ids == set(range(self.num_blocks)) - free
        assert sorted(manager.hash_to_block_id.values()) == sorted(self.cached.values())
        assert all(manager.blocks[b].hash == h for h, b in manager.hash_to_block_id.items())


def run_block_manager(seed: int) -> None:
    rng = random.Random(seed)
    size, num_blocks, vocab = rng.choice((1, 2, 3, 4)), rng.randint(2, 12), rng.choice((2, 5))
    manager, model = BlockManager(num_blocks, size), Model(num_blocks, size)
    live: list[Sequence] = []
    for _ in range(120):
        action = rng.random()
        if action < 0.4:
            seq = Sequence(random_tokens(rng, rng.randint(1, num_blocks * size), vocab), size)
            free_before = list(manager.free_block_ids)
            hits = manager.can_allocate(seq)
            assert list(manager.free_block_ids) == free_before, "asking changed the free list"
            assert hits == model.can_allocate(seq.token_ids)
            if hits >= 0:
                expected = model.hits(seq.token_ids)
                manager.allocate(seq, hits)
                assert seq.block_table[:hits] == expected and seq.num_cached_tokens == hits * size
                assert len(seq.block_table) == seq.num_blocks
                model.forget(seq.block_table[hits:])
                model.tables[seq.seq_id] = seq.block_table
                live.append(seq)
        elif action < 0.65 and live:
            seq = rng.choice(live)
            start, end = seq.num_cached_tokens, rng.randint(seq.num_cached_tokens, len(seq))
            manager.hash_blocks(seq, start, end)
            model.publish(seq, start, end)
            seq.num_cached_tokens = end
        elif action < 0.85 and live:
            seq = rng.choice(live)
            if seq.num_cached_tokens < len(seq):  # decode: compute all, then sample one
                manager.hash_blocks(seq, seq.num_cached_tokens, len(seq))
                model.publish(seq, seq.num_cached_tokens, len(seq))
                seq.num_cached_tokens = len(seq)
            seq.token_ids.append(rng.randrange(vocab))
            known = len(seq.block_table)
            missing = seq.num_blocks - known
            assert missing in (0, 1) and manager.can_append(seq) == (missing <= model.num_free())
            if manager.can_append(seq):
                manager.may_append(seq)
                assert len(seq.block_table) == seq.num_blocks
                model.forget(seq.block_table[known:])
            else:
                seq.token_ids.pop()
        elif live:
            seq = live.pop(rng.randrange(len(live)))
            manager.deallocate(seq)
            del model.tables[seq.seq_id]
        model.check(manager)
    for seq in live:
        manager.deallocate(seq)
    assert len(manager.free_block_ids) == num_blocks and not manager.used_block_ids


@pytest.mark.parametrize("first", range(0, 600, 200))
def test_block_manager_equals_brute_force(first: int) -> None:
    for seed in range(first, first + 200):
        try:
            run_block_manager(seed)
        except AssertionError as e:
            raise AssertionError(f"seed {seed}: {e}") from e
