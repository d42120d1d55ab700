"""Prefix cache and block accounting: one test for every known failure (A1 ..), with its smallest trigger."""

import random
from collections import OrderedDict

import pytest
from engine.fakes import check_invariants, complete, greedy, make_engine, run_all

from nanovllm.engine.block_manager import ROOT_HASH, BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.sequence import Sequence

A, B, C, D = ([t] * 4 for t in (1, 2, 3, 4))  # a block's worth of one token


def manager_of(engine: LLMEngine) -> BlockManager:
    return engine.scheduler.block_manager


def cold(prompt: list[int], max_tokens: int) -> list[int]:
    return complete(make_engine(64), prompt, greedy(max_tokens)).token_ids


def test_a1_recycled_block_is_not_found_under_its_old_hash() -> None:
    engine = make_engine(3)
    x, y = list(range(9)), list(range(100, 109))
    first = complete(engine, x, greedy(3))
    complete(engine, y, greedy(3))
    third = complete(engine, x, greedy(3))
    assert third.num_cached_tokens == 0
    assert third.token_ids == first.token_ids == cold(x, 3)


@pytest.mark.parametrize("overlap", [False, True])
def test_a2_fully_cached_prompt_computes_its_last_block(overlap: bool) -> None:
    engine = make_engine(8, overlap=overlap)
    first = complete(engine, [*A, *B], greedy(1))
    num_steps = len(engine.runner.batches)
    second = complete(engine, [*A, *B], greedy(1))
    assert second.num_cached_tokens == 4
    assert second.token_ids == first.token_ids and len(second.token_ids) == 1
    (batch,) = engine.runner.batches[num_steps:]
    (chunk,) = batch.chunks
    assert (chunk.start, chunk.end, chunk.is_last) == (4, 8, True)


def test_a3_twins_of_one_step_share_nothing() -> None:
    engine = make_engine(16)
    requests = [engine.add_request(list(range(9)), greedy(3)) for _ in range(2)]
    engine.step()
    first, second = (r.sequences[0] for r in requests)
    assert first.num_prefix_tokens == second.num_prefix_tokens == 0
    assert not set(first.block_table) & set(second.block_table)
    run_all(engine)
    for request in requests:
        assert engine.output(request).token_ids == cold(list(range(9)), 3)


def test_a3_twin_of_a_chunked_prompt_does_not_read_unwritten_slots() -> None:
    engine = make_engine(16, max_num_batched_tokens=6)
    requests = [engine.add_request(list(range(9)), greedy(3)) for _ in range(2)]
    run_all(engine)  # the fake runner checks the K/V
    assert [engine.output(r).token_ids for r in requests] == [cold(list(range(9)), 3)] * 2


@pytest.mark.parametrize("loser_first", [False, True])
def test_a4_twins_leave_one_valid_entry_a_block(loser_first: bool) -> None:
    engine = make_engine(16)
    prompt = list(range(9))
    limits = (4, 2) if loser_first else (2, 4)
    winner, loser = (engine.add_request(prompt, greedy(m)).sequences[0] for m in limits)
    engine.step()
    winner_ids, loser_ids = list(winner.block_table), list(loser.block_table)
    run_all(engine)
    third = engine.add_request(prompt, greedy(3)).sequences[0]
    engine.step()
    assert third.num_prefix_tokens == 8
    assert third.block_table[:2] == winner_ids[:2]
    assert [manager_of(engine).blocks[b].ref_count for b in third.block_table] == [1, 1, 1]
    run_all(engine)
    for block_id in loser_ids[:2]:  # nobody can hit these: they are the next to be used again
        assert block_id in list(manager_of(engine).free_block_ids)[:13]
        assert manager_of(engine).hash_to_block_id[manager_of(engine).blocks[winner_ids[0]].hash] == winner_ids[0]


def test_a4_reusing_the_loser_keeps_the_winner() -> None:
    manager = BlockManager(4, 4)
    winner, loser = Sequence([*A, 9], 4), Sequence([*A, 9], 4)
    for seq in (winner, loser):
        manager.allocate(seq, manager.can_allocate(seq))
    manager.hash_blocks(winner, 0, 5)
    manager.hash_blocks(loser, 0, 5)
    h = manager.compute_hash(A)
    winner_id, loser_id = winner.block_table[0], loser.block_table[0]
    assert manager.hash_to_block_id == {h: winner_id}
    manager.deallocate(loser)
    other = Sequence([*B, *C], 4)
    manager.allocate(other, manager.can_allocate(other))
    assert loser_id in other.block_table
    assert manager.hash_to_block_id == {h: winner_id}


def test_a5_revived_block_keeps_its_place_in_the_chain() -> None:
    engine = make_engine(8)
    complete(engine, [*A, *B, 9], greedy(1))
    second = engine.add_request([*A, *D, 9], greedy(2)).sequences[0]
    engine.step()
    manager = manager_of(engine)
    assert second.num_prefix_tokens == 4
    h_a = manager.compute_hash(A)
    assert [manager.blocks[b].hash for b in second.block_table[:2]] == [h_a, manager.compute_hash(D, h_a)]
    run_all(engine)
    third = complete(engine, [*D, 8], greedy(3))
    assert third.num_cached_tokens == 0
    assert third.token_ids == cold([*D, 8], 3)


def test_a6_blocks_of_a_finished_request_are_hits() -> None:
    engine = make_engine(16)
    prompt = list(range(9))
    first = engine.add_request(prompt, greedy(1)).sequences[0]
    engine.step()
    hit_ids = list(manager_of(engine).hash_to_block_id.values())
    run_all(engine)
    assert first.block_table == [] and all(b in manager_of(engine).free_block_ids for b in hit_ids)
    num_steps = len(engine.runner.writes)
    second = engine.add_request(prompt, greedy(2)).sequences[0]
    engine.step()
    assert second.num_prefix_tokens == 8
    assert second.block_table[:2] == hit_ids
    assert not set(hit_ids) & set(manager_of(engine).free_block_ids)
    assert [manager_of(engine).blocks[b].ref_count for b in hit_ids] == [1, 1]
    run_all(engine)
    written = {slot // 4 for slots in engine.runner.writes[num_steps:] for slot in slots}
    assert not written & set(hit_ids)


def test_a7_shared_blocks_need_no_free_ones() -> None:
    engine = make_engine(4)
    prompt = list(range(8))
    first = engine.add_request([*prompt, 50], greedy(3)).sequences[0]
    engine.step()
    assert len(manager_of(engine).free_block_ids) == 1
    second = engine.add_request([*prompt, 60], greedy(3)).sequences[0]
    engine.step()
    assert second in engine.scheduler.running
    assert len(manager_of(engine).free_block_ids) == 0
    assert second.block_table[:2] == first.block_table[:2]
    assert [manager_of(engine).blocks[b].ref_count for b in first.block_table] == [2, 2, 1]
    run_all(engine)


def test_a8_hits_on_free_blocks_use_free_blocks() -> None:
    engine = make_engine(3)
    prompt = list(range(9))
    complete(engine, prompt, greedy(1))
    manager = manager_of(engine)
    before = list(manager.free_block_ids)
    too_long = Sequence([*prompt[:8], *range(20, 28)], 4)
    assert too_long.num_blocks == 4 and len(manager.hash_to_block_id) == 2
    assert manager.can_allocate(too_long) == -1
    assert list(manager.free_block_ids) == before and too_long.block_table == []


def parentless(self: BlockManager, token_ids: list[int], parent_hash: int = ROOT_HASH) -> int:
    return hash(tuple(token_ids)) & 0xFFFF


def constant(self: BlockManager, token_ids: list[int], parent_hash: int = ROOT_HASH) -> int:
    return 5


@pytest.mark.parametrize(
    "collide, second", [(parentless, [*B, 90]), (constant, [*B, *C, 91]), (constant, [*A, *C, 92])]
)
def test_a9_colliding_hashes_give_no_hit(monkeypatch: pytest.MonkeyPatch, collide: object, second: list[int]) -> None:
    expected = cold(second, 3)
    monkeypatch.setattr(BlockManager, "compute_hash", collide)
    engine = make_engine(16)
    for prompt in ([*A, *B, 80], second):
        request = engine.add_request(prompt, greedy(3))
        while engine.has_work:
            engine.step()  # the fake runner checks the K/V
    output = engine.output(request)
    assert output.num_cached_tokens == (4 if second[:4] == A else 0)  # the same block in the same place is a hit
    assert output.token_ids == expected


def test_a10_map_is_bounded_by_the_pool() -> None:
    engine = make_engine(8)
    engine.runner.keep = False
    rng = random.Random(0)
    for _ in range(2000):
        engine.add_request([rng.randrange(1000) for _ in range(9)], greedy(2))
        while engine.has_work:
            engine.step()
            assert len(manager_of(engine).hash_to_block_id) <= 8
        engine.runner.prefix_hashes.clear()
    assert sum(len(b.token_ids) for b in manager_of(engine).blocks) <= 8 * 4


@pytest.mark.parametrize("overlap", [False, True])
def test_a11_block_filled_by_the_sampled_token_is_not_published(overlap: bool) -> None:
    engine = make_engine(16, overlap=overlap)
    first = complete(engine, list(range(7)), greedy(1))
    prompt = [*range(7), *first.token_ids]
    assert len(prompt) == 8 and len(manager_of(engine).hash_to_block_id) == 1
    second = complete(engine, [*prompt, 77], greedy(1))
    assert second.num_cached_tokens == 4


def test_a12_live_blocks_are_never_handed_out() -> None:
    engine = make_engine(6)
    prefix = list(range(8))
    complete(engine, [*prefix, 1], greedy(1))
    holder = engine.add_request([*prefix, 2], greedy(4)).sequences[0]
    engine.step()
    assert holder.num_prefix_tokens == 8
    held = set(holder.block_table)
    others = [engine.add_request([i] * 12, greedy(1)) for i in range(20, 24)]  # each takes all that is free
    while not all(r.is_finished for r in others):
        tables = [s.block_table for s in engine.scheduler.running if s is not holder]
        if not holder.is_finished:
            assert not held & {b for table in tables for b in table}
        engine.step()
        check_invariants(engine)
    run_all(engine)
    assert holder.completion_token_ids == cold([*prefix, 2], 4)


@pytest.mark.parametrize("overlap", [False, True])
def test_a15_abort_in_the_step_that_ends_it_frees_once(overlap: bool) -> None:
    engine = make_engine(8, lambda h, seq, position: 3, eos=(3,), overlap=overlap)
    request = engine.add_request(list(range(9)), greedy(5), "a")
    engine.runner.on_launch = lambda batch: engine.abort("a")  # after schedule(), before postprocess()
    run_all(engine)
    assert request.sequences[0].finish_reason == "abort" and engine.output(request).token_ids == []
    engine.runner.on_launch = None
    engine.abort("a")
    engine.abort("never seen")
    run_all(engine)
    assert complete(engine, list(range(9)), greedy(5)).finish_reason == "stop"


class CountingDict(OrderedDict):
    """Counts the operations that touch one entry, and refuses those that walk over all."""

    count = 0

    def __setitem__(self, key: int, value: None) -> None:
        CountingDict.count += 1
        super().__setitem__(key, value)

    def __delitem__(self, key: int) -> None:
        CountingDict.count += 1
        super().__delitem__(key)

    def __iter__(self):
        raise AssertionError("walked over the whole free list")


def test_a18_cost_is_in_the_blocks_touched_not_in_the_pool() -> None:
    counts = []
    for num_blocks in (256, 100_000):
        manager = BlockManager(num_blocks, 1)
        seq = Sequence(list(range(101)), 1)
        manager.allocate(seq, manager.can_allocate(seq))
        manager.hash_blocks(seq, 0, 101)
        manager.deallocate(seq)
        free = CountingDict()
        for block_id in manager.free_block_ids:
            OrderedDict.__setitem__(free, block_id, None)
        manager.free_block_ids = free
        CountingDict.count = 0
        again = Sequence(list(range(101)), 1)
        hits = manager.can_allocate(again)
        assert hits == 100
        manager.allocate(again, hits)  # revives 100
        manager.deallocate(again)
        counts.append(CountingDict.count)
    assert counts[0] == counts[1] <= 4 * 101


def test_prefix_caching_off_publishes_nothing() -> None:
    engine = make_engine(8, enable_prefix_caching=False)
    for _ in range(2):
        output = complete(engine, [*A, *B, 9], greedy(3))
        assert output.num_cached_tokens == 0 and not manager_of(engine).hash_to_block_id
        assert output.token_ids == cold([*A, *B, 9], 3)


def test_freed_prefix_is_lost_from_its_tail() -> None:
    """A prefix of which the head is gone is worth nothing, so the tail goes first."""
    engine = make_engine(4)
    complete(engine, [*A, *B, *C, 9], greedy(1))
    complete(engine, [500, 501, 502, 503, 504], greedy(1))  # needs two: the unpublished block, and one of the prefix
    assert complete(engine, [*A, *B, *C, 9], greedy(1)).num_cached_tokens == 8


@pytest.mark.parametrize("overlap", [False, True])
def test_blocks_filled_by_decoding_are_hits(overlap: bool) -> None:
    engine = make_engine(16, overlap=overlap)
    first = complete(engine, list(range(6)), greedy(8))  # 14 tokens, K/V of 13
    second = complete(engine, [*range(6), *first.token_ids, 500], greedy(2))
    assert second.num_cached_tokens == 12
