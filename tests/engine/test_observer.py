"""Events of an engine: a view built from nothing else equals the block manager and the scheduler after every step."""

import json
import random

import pytest
from engine.fakes import by_hash, check_idle, check_invariants, greedy, live_sequences, make_engine, random_tokens

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.observer import Event, observe, unobserve
from nanovllm.inspector.view import View
from nanovllm.sampling_params import SamplingParams

overlaps = pytest.mark.parametrize("overlap", [False, True])


def as_hex(value: int | None) -> str | None:
    return None if value is None or value < 0 else f"{value:032x}"


class Watcher:
    """A sink that keeps the events and a view of them, which went through JSON as those of a file or a page do."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.view = View()

    def __call__(self, event: Event) -> None:
        event = json.loads(json.dumps(event))
        self.events.append(event)
        self.view.apply(event)


def check_view(view: View, engine: LLMEngine) -> None:
    """Every field of the view against the engine's own state."""
    scheduler, manager = engine.scheduler, engine.scheduler.block_manager
    assert (view.num_blocks, view.block_size) == (len(manager.blocks), manager.block_size)
    assert view.running == [s.seq_id for s in scheduler.running]
    assert view.waiting == [s.seq_id for s in scheduler.waiting]
    assert view.num_preemptions == scheduler.num_preemptions
    assert {b: len(o) for b, o in view.owners.items()} == {
        b: manager.blocks[b].ref_count for b in manager.used_block_ids
    }
    contents = {
        b.block_id: (as_hex(b.hash), as_hex(b.parent_hash), b.token_ids) for b in manager.blocks if b.hash is not None
    }
    assert {b: (c.hash, c.parent_hash, c.token_ids) for b, c in view.contents.items()} == contents
    assert view.hash_to_block_id == {as_hex(h): b for h, b in manager.hash_to_block_id.items()}
    assert {b for b, c in view.contents.items() if c.is_published} == set(manager.hash_to_block_id.values())
    holders = {s.seq_id: s for s in (*live_sequences(engine), *scheduler.waiting) if s.block_table or not s.is_finished}
    assert view.seqs.keys() == holders.keys()
    for seq_id, seq in holders.items():
        seen = view.seqs[seq_id]
        assert seen.block_table == seq.block_table, f"{seq}"
        assert seen.token_ids == seq.token_ids, f"{seq}"
        assert seen.max_length == seq.max_length and seen.num_prompt_tokens == seq.num_prompt_tokens
        if not seq.is_finished:
            assert seen.num_cached == seq.num_cached_tokens, f"{seq}"
            assert seen.name == seq.data.request.request_id + (f"#{seq.data.index}" if seq.params.n > 1 else "")
        assert seen.reason == seq.finish_reason


def fuzz(engine: LLMEngine, rng: random.Random, num_rounds: int, after_step) -> None:
    """Random requests with common prefixes, aborts, and pools too small for all of them."""
    prefixes = [random_tokens(rng, rng.randrange(4, 30), 50) for _ in range(3)]
    for i in range(num_rounds):
        if rng.random() < 0.35:
            prompt = rng.choice(prefixes)[: rng.randrange(1, 30)] + random_tokens(rng, rng.randrange(1, 12), 50)
            params = SamplingParams(
                temperature=rng.choice([0, 1]),
                max_tokens=rng.randrange(1, 30),
                n=rng.choice([1, 1, 1, 3]),
                ignore_eos=rng.random() < 0.5,
                presence_penalty=rng.choice([0, 0, 0.5]),
            )
            engine.add_request(prompt, params, f"r{i}")
            after_step()
        if engine.requests and rng.random() < 0.05:
            engine.abort(rng.choice(list(engine.requests)))
            after_step()
        if engine.has_work:
            engine.step()
            after_step()
    while engine.has_work:
        engine.step()
        after_step()


@overlaps
@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("seed", range(4))
def test_view_equals_the_engine_after_every_step(overlap: bool, caching: bool, seed: int) -> None:
    rng = random.Random(seed)
    engine = make_engine(
        24,
        by_hash(60),
        overlap=overlap,
        eos=(0,),
        max_num_seqs=6,
        max_num_batched_tokens=20,
        max_model_len=80,
        enable_prefix_caching=caching,
    )
    watcher, late = Watcher(), Watcher()
    observe(engine, watcher)
    num_checks = 0

    def after_step() -> None:
        nonlocal num_checks
        num_checks += 1
        check_invariants(engine)
        check_view(watcher.view, engine)
        if num_checks == 100:  # one that comes later sees the same from then on
            observe(engine, late)
        if num_checks >= 100:
            check_view(late.view, engine)

    fuzz(engine, rng, 400, after_step)
    check_idle(engine)
    assert watcher.view.num_preemptions > 0
    assert (watcher.view.num_prefix_tokens > 0) is caching
    steps = [e["step"] for e in watcher.events if e["kind"] == "step" and any(op[0] == "launch" for op in e["ops"])]
    assert steps == list(range(len(engine.runner.batches)))
    done = [e["done"][0] for e in watcher.events if "done" in e]
    assert done == steps
    assert all(min(e["us"]) >= 0 and len(e["us"]) == 4 for e in watcher.events if e["kind"] == "step")


@overlaps
def test_observing_changes_no_output(overlap: bool) -> None:
    def run(watched: bool) -> list[list[int]]:
        engine = make_engine(20, by_hash(60), overlap=overlap, max_num_seqs=5, max_model_len=60)
        if watched:
            observe(engine, Watcher())
        requests = [engine.add_request([i, i + 1, 3], SamplingParams(max_tokens=20 + i)) for i in range(8)]
        while engine.has_work:
            engine.step()
        return [engine.output(r).token_ids for r in requests]

    assert run(True) == run(False)


def test_nothing_is_kept_when_nobody_watches() -> None:
    engine = make_engine()
    scheduler = engine.scheduler
    assert engine.observer is None and scheduler.journal is None and scheduler.block_manager.journal is None
    first, second = Watcher(), Watcher()
    observe(engine, first)
    observe(engine, second)
    unobserve(engine, first)
    engine.add_request([1, 2, 3], greedy(3))
    engine.step()
    assert [e["kind"] for e in first.events] == ["snapshot"]
    assert [e["kind"] for e in second.events] == ["snapshot", "change", "step"]
    unobserve(engine, second)
    unobserve(engine, second)  # a second time: nothing
    assert engine.observer is None and scheduler.journal is None and scheduler.block_manager.journal is None
    engine.step()
    assert len(second.events) == 3


@overlaps
def test_a_failed_step_is_followed_by_a_snapshot_of_the_new_scheduler(overlap: bool) -> None:
    engine = make_engine(overlap=overlap)
    watcher = Watcher()
    observe(engine, watcher)
    engine.add_request([1, 2, 3, 4, 5], greedy(10))
    engine.step()

    def fail(_: object) -> None:
        raise MemoryError

    engine.runner.on_launch = fail
    with pytest.raises(MemoryError):
        engine.step()
    engine.runner.on_launch = None
    assert watcher.events[-1]["kind"] == "snapshot" and not watcher.view.seqs
    check_view(watcher.view, engine)
    engine.add_request([1, 2, 3, 4, 5], greedy(3))
    while engine.has_work:
        engine.step()
        check_view(watcher.view, engine)


def test_device_time_is_asked_for_only_while_observed() -> None:
    engine = make_engine()
    engine.runner.times_steps = False
    watcher = Watcher()
    observe(engine, watcher)
    assert engine.runner.times_steps
    collect = engine.runner.launch

    def launch(batch):
        handle = collect(batch)
        handle.device_seconds = lambda: 0.0125
        return handle

    engine.runner.launch = launch
    engine.add_request([1, 2, 3], greedy(2))
    engine.step()
    assert watcher.events[-1]["done"] == [0, 12500]
    unobserve(engine, watcher)
    assert not engine.runner.times_steps


def test_unchanged_batches_are_not_said_again() -> None:
    engine = make_engine()
    watcher = Watcher()
    observe(engine, watcher)
    for i in range(3):
        engine.add_request([i, 2, 3], greedy(20))
    for _ in range(6):
        engine.step()
    last = {op[0]: op[1:] for op in watcher.events[-1]["ops"]}
    assert last["launch"] == [None, []] and last["tokens"][0] is None and len(last["tokens"][1]) == 3
    assert "next" not in last
