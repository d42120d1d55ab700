"""Scheduling, chunked prefill and preemption: one test for every known failure (B1 ..), with its smallest trigger."""

import pickle

import pytest
from engine.fakes import by_hash, check_invariants, complete, greedy, make_engine, run_all

from nanovllm.engine.llm_engine import LLMEngine, Request
from nanovllm.engine.scheduler import Scheduler
from nanovllm.engine.sequence import Sequence

overlaps = pytest.mark.parametrize("overlap", [False, True])


def alone(prompt: list[int], max_tokens: int) -> list[int]:
    return complete(make_engine(64), prompt, greedy(max_tokens)).token_ids


def tokens_of(engine: LLMEngine, request: Request) -> list[int]:
    return engine.output(request).token_ids


@overlaps
def test_b1_last_sequence_ends_when_the_pool_is_full(overlap: bool) -> None:
    engine = make_engine(2, overlap=overlap)
    output = complete(engine, list(range(6)), greedy(20, ignore_eos=True))
    assert output.finish_reason == "length"
    assert output.token_ids == alone(list(range(6)), 20)[:3]  # 8 slots, and the last token needs none
    assert len(complete(engine, [1], greedy(2)).token_ids) == 2


def test_b2_prompt_larger_than_the_pool_is_refused_with_both_numbers() -> None:
    engine = make_engine(2)
    waiting = engine.add_request([1, 2], greedy(2))
    with pytest.raises(ValueError, match=r"prompt of 12 tokens needs 3 KV-cache blocks of 4 tokens, the pool has 2"):
        engine.add_request(list(range(12)), greedy(1))
    run_all(engine)
    assert tokens_of(engine, waiting) == alone([1, 2], 2)


@overlaps
def test_b3_step_without_work_does_not_call_the_model(overlap: bool) -> None:
    engine = make_engine(8, overlap=overlap)
    engine.add_request([1, 2, 3], greedy(20), "a")
    engine.step()
    engine.step()
    engine.abort("a")
    num_calls = len(engine.runner.batches)
    for _ in range(3):
        result = engine.step()
        assert not result.updated and not result.finished
    assert len(engine.runner.batches) == num_calls
    run_all(engine)


def test_b4_prefix_hit_shortens_the_chunk() -> None:
    engine = make_engine(16)
    prompt = list(range(9))
    complete(engine, prompt, greedy(1))
    request = engine.add_request([*prompt, 20, 21, 22], greedy(2))
    engine.step()
    (chunk,) = engine.runner.batches[-1].chunks
    assert (chunk.start, chunk.end) == (8, 12)
    assert len(engine.runner.writes[-1]) == 4 == request.sequences[0].num_scheduled_tokens
    run_all(engine)


def test_b5_chunk_attends_to_what_is_computed_only() -> None:
    model_runner = pytest.importorskip("nanovllm.engine.model_runner", reason="needs the compiled operators")
    engine = make_engine(16, max_num_batched_tokens=5)
    engine.add_request(list(range(10, 19)), greedy(1))
    run_all(engine)
    first, second = (b.chunks for b in engine.runner.batches)
    assert [(c.start, c.end) for c in (*first, *second)] == [(0, 5), (5, 9)]
    arrays = model_runner.ModelRunner.prepare_prefill(None, second)
    assert arrays["cu_seqlens_q"].tolist() == [0, 4]
    assert arrays["cu_seqlens_k"].tolist() == [0, 9]
    assert arrays["context_lens"].tolist() == [9] and arrays["prefill_start_pos"].tolist() == [5]
    assert arrays["input_ids"].tolist() == [15, 16, 17, 18]
    arrays = model_runner.ModelRunner.prepare_prefill(None, first)
    assert arrays["cu_seqlens_k"].tolist() == [0, 5]


@overlaps
def test_b6_preempted_sequence_resumes_without_a_seam(overlap: bool) -> None:
    engine = make_engine(5, overlap=overlap)
    prompts = [list(range(7)), list(range(50, 57))]
    requests = [engine.add_request(p, greedy(8)) for p in prompts]
    preempted = []
    while engine.has_work:
        engine.step()
        check_invariants(engine)
        preempted += [s for s in engine.scheduler.waiting if s.num_completion_tokens > 0]
    assert set(preempted) == {requests[1].sequences[0]} and engine.scheduler.num_preemptions >= 1
    assert [tokens_of(engine, r) for r in requests] == [alone(p, 8) for p in prompts]


def test_b7_preempted_sequence_prefills_all_its_tokens() -> None:
    """Prefill or decode is what the batch says, not a guess from the sequence's tokens."""
    engine = make_engine(16)
    request = engine.add_request(list(range(5)), greedy(8))
    seq = request.sequences[0]
    while seq.num_completion_tokens < 3:
        engine.step()
    assert engine.runner.batches[-1].decodes == [seq] and not engine.runner.batches[-1].chunks
    engine.scheduler.preempt(seq)
    again = pickle.loads(pickle.dumps(_without_request(seq)))
    assert again.token_ids == seq.token_ids and len(again.token_ids) == 8 and again.block_table == []
    engine.step()
    (chunk,) = engine.runner.batches[-1].chunks
    assert (chunk.seq, chunk.start, chunk.end, chunk.is_last) == (seq, 4, 8, True)  # its first block was still cached
    assert not engine.runner.batches[-1].decodes
    again = pickle.loads(pickle.dumps(_without_request(seq)))
    for name in ("token_ids", "block_table", "num_cached_tokens", "num_scheduled_tokens", "num_launched_tokens"):
        assert getattr(again, name) == getattr(seq, name)
    run_all(engine)
    assert tokens_of(engine, request) == alone(list(range(5)), 8)


def _without_request(seq: Sequence) -> Sequence:
    seq_copy = object.__new__(Sequence)
    for name in Sequence.__slots__:
        setattr(seq_copy, name, None if name == "data" else getattr(seq, name))
    return seq_copy


@overlaps
@pytest.mark.parametrize("block_size", [1, 2, 4])
def test_b8_decode_has_exactly_the_blocks_it_needs(block_size: int, overlap: bool) -> None:
    engine = make_engine(32, kvcache_block_size=block_size, overlap=overlap)
    lengths: set[int] = set()

    def check(batch: object) -> None:
        for seq, end in zip(batch.decodes, batch.decode_ends):
            lengths.add(end)
            assert end == len(seq) - 1  # len counts the token that this step samples, too
            assert len(seq.block_table) == -(-end // block_size)

    engine.runner.on_launch = check
    complete(engine, [1], greedy(14))
    assert lengths == set(range(2, 15))
    for seq, slots in ((b.decodes[0], s) for b, s in zip(engine.runner.batches, engine.runner.writes) if b.decodes):
        assert len(slots) == 1 and seq.is_finished


@overlaps
def test_b9_new_prompts_do_not_stop_decoding(overlap: bool) -> None:
    engine = make_engine(200, overlap=overlap, max_num_batched_tokens=16, max_num_seqs=8, enable_prefix_caching=False)
    first = engine.add_request([1, 2, 3], greedy(20))
    engine.step()
    for i in range(20):
        engine.add_request([100 + i] * 17, greedy(1))
        engine.step()
        batch = engine.runner.batches[-1]
        if not first.is_finished:
            assert batch.decodes[0] is first.sequences[0] and batch.chunks, "decode and prefill share every step"
    run_all(engine)


def test_b10_max_num_seqs_bounds_the_admitted() -> None:
    engine = make_engine(64, max_num_seqs=2)
    for i in range(6):
        engine.add_request([i + 1] * 5, greedy(3))
    for _ in range(3):
        engine.step()
        assert len(engine.scheduler.running) <= 2
        holders = [s for s in engine.scheduler.waiting if s.block_table]
        assert not holders
    run_all(engine)


@overlaps
def test_b11_chunk_that_is_not_the_last_samples_nothing(overlap: bool) -> None:
    engine = make_engine(16, max_num_batched_tokens=4, overlap=overlap)
    request = engine.add_request(list(range(10)), greedy(4))
    seq = request.sequences[0]
    while seq.num_completion_tokens == 0:
        engine.step()
    chunks = [(c.start, c.end, c.is_last) for b in engine.runner.batches for c in b.chunks]
    assert chunks == [(0, 4, False), (4, 8, False), (8, 10, True)]
    assert [len(b.sampled) for b in engine.runner.batches[:3]] == [0, 0, 1]
    run_all(engine)
    assert tokens_of(engine, request) == alone(list(range(10)), 4)


def test_b12_budget_holds_in_every_step() -> None:
    engine = make_engine(64, max_num_batched_tokens=16)
    for i in range(5):
        engine.add_request([i + 1] * 10, greedy(4))
    run_all(engine)
    sizes = [b.num_tokens for b in engine.runner.batches]
    assert max(sizes) == 16 and sizes[0] == 16
    assert all(sum(not c.is_last for c in b.chunks) <= 1 for b in engine.runner.batches), "one prompt a step is cut"


@overlaps
def test_b13_victims_are_the_youngest_and_resume_in_order(overlap: bool) -> None:
    engine = make_engine(6, overlap=overlap, enable_prefix_caching=False)
    a, b, c = (engine.add_request([i] * 7, greedy(14), name).sequences[0] for i, name in enumerate("abc", 1))
    engine.step()
    assert engine.scheduler.running == [a, b, c]
    late = engine.add_request([9] * 2, greedy(2), "late").sequences[0]
    admitted: list[Sequence] = []
    while engine.has_work:
        before = set(engine.scheduler.running)
        engine.step()
        check_invariants(engine)
        admitted += [s for s in engine.scheduler.running if s not in before]
        waiting = list(engine.scheduler.waiting)
        if b in waiting and c in waiting:
            assert waiting.index(b) < waiting.index(c)
        if late in waiting:
            assert waiting[-1] is late
    assert engine.scheduler.num_preemptions >= 2
    order = [s for s in admitted if s in (b, c, late)]
    assert order.index(b) < order.index(late)
    for seq, token in ((a, 1), (b, 2), (c, 3)):
        assert seq.completion_token_ids == alone([token] * 7, 14)


@pytest.mark.parametrize("where", ["on_launch", "on_collect"])
@overlaps
def test_b15_failed_step_leaves_nothing_behind(overlap: bool, where: str) -> None:
    engine = make_engine(16, overlap=overlap)

    def fail(*_: object) -> None:
        raise RuntimeError("broken kernel")

    old = [engine.add_request([i] * 5, greedy(5)) for i in range(1, 4)]
    engine.step()
    setattr(engine.runner, where, fail)
    with pytest.raises(RuntimeError, match="broken kernel"):
        for _ in range(3):
            engine.step()
    setattr(engine.runner, where, None)
    assert len(engine.scheduler.block_manager.free_block_ids) == 16 and not engine.has_work
    assert all(engine.output(r).finish_reason == "abort" and engine.output(r).latency is not None for r in old)
    output = complete(engine, [7, 8], greedy(3))
    assert output.token_ids == alone([7, 8], 3)


def test_b17_sequences_end_at_max_model_len() -> None:
    engine = make_engine(64, max_model_len=16)
    output = complete(engine, list(range(10)), greedy(20))
    assert output.finish_reason == "length" and len(output.token_ids) == 6
    with pytest.raises(ValueError, match=r"prompt of 16 tokens leaves no room .* max_model_len = 16"):
        engine.add_request(list(range(16)), greedy(1))
    assert len(complete(engine, list(range(15)), greedy(5)).token_ids) == 1


@overlaps
def test_penalised_sequences_wait_for_their_tokens(overlap: bool) -> None:
    """Penalties count tokens on the host; other sequences of the batch keep their step in flight."""
    engine = make_engine(32, overlap=overlap)
    penalised = engine.add_request([1, 2, 3], greedy(6, frequency_penalty=0.5))
    plain = engine.add_request([4, 5, 6], greedy(6))
    run_all(engine)  # the fake runner asserts that the token is known
    assert tokens_of(engine, penalised) == alone([1, 2, 3], 6)
    assert tokens_of(engine, plain) == alone([4, 5, 6], 6)


def test_surplus_token_of_an_ended_sequence_is_dropped_and_its_blocks_wait() -> None:
    engine = make_engine(8, lambda h, seq, position: 3 if position == 6 else 5, eos=(3,), overlap=True)
    request = engine.add_request([1, 2, 3, 4], greedy(20))
    while not request.is_finished:
        engine.step()
    assert engine.scheduler.draining == 1 and engine.scheduler.block_manager.used_block_ids
    assert tokens_of(engine, request) == [5, 5, 3]
    run_all(engine)
    assert tokens_of(engine, request) == [5, 5, 3]


def test_sequence_in_the_last_free_row_waits_for_draining_ones() -> None:
    engine = make_engine(32, by_hash(50), overlap=True, max_num_seqs=1, eos=tuple(range(0, 50, 3)))
    requests = [engine.add_request([i, i + 1], greedy(9)) for i in range(8)]
    run_all(engine)
    assert all(r.is_finished for r in requests)


def test_scheduler_refuses_an_empty_prompt() -> None:
    scheduler: Scheduler = make_engine(4).scheduler
    with pytest.raises(ValueError, match="prompt is empty"):
        scheduler.add(Sequence([], 4))
    assert not scheduler.waiting


@overlaps
def test_rows_stay_dense_when_sequences_end(overlap: bool) -> None:
    """A decode step costs as much as its highest row: once a row is free, the highest one in use moves there."""
    engine = make_engine(64, overlap=overlap, max_num_seqs=12)
    prompts = [[20 + i] * 5 for i in range(12)]
    requests = [engine.add_request(p, greedy(12 if i % 3 == 2 else 4)) for i, p in enumerate(prompts)]
    rows: list[list[int]] = []  # of every step's decodes
    engine.runner.on_launch = lambda batch: rows.append(sorted(s.row for s in batch.decodes))
    run_all(engine)
    few = [r for r in rows if len(r) == 4]
    assert len(few) >= 7 and all(r == [0, 1, 2, 3] for r in few[2:]), few
    moves = [move for batch in engine.runner.batches for move in batch.moves]
    assert sorted(moves) == [(5, 0), (8, 1), (11, 3)], "row 2 stays"
    for request, prompt in zip(requests, prompts):
        seq = request.sequences[0]
        assert tokens_of(engine, request) == alone(prompt, seq.params.max_tokens)


@overlaps
def test_new_sequences_come_before_moves(overlap: bool) -> None:
    """While others wait for a free row, nothing moves."""
    engine = make_engine(64, overlap=overlap, max_num_seqs=4)
    for i in range(12):
        engine.add_request([20 + i] * 5, greedy(3 + i % 4))
    while engine.scheduler.waiting:
        engine.step()
        check_invariants(engine)
        if engine.scheduler.waiting:
            assert not engine.runner.batches[-1].moves
    run_all(engine)
