"""AsyncLLM.open_stream: tokens one by one, several prompts in one stream, and readers that are woken less often."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from engine.fakes import by_hash, check_idle, complete, greedy, make_engine

from nanovllm.sampling_params import SamplingParams

async_module = pytest.importorskip("nanovllm.async_llm", reason="needs torch and the model configs")
PATIENCE = 30  # seconds until a test that hangs fails
VOCAB = 300


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Any]]:
    """AsyncLLM over a fake engine; all are shut down, and checked to be idle, after the test."""
    made = []

    def make(**options: Any) -> Any:
        engine = make_engine(128, by_hash(VOCAB), **({"vocab_size": VOCAB, "eos": (0,)} | options))
        monkeypatch.setattr(async_module, "build_engine", lambda config: (engine, greedy(5)))
        made.append(async_module.AsyncLLM("fake"))
        return made[-1]

    yield make
    for llm in made:
        llm.engine.runner.on_launch = None
        llm.shutdown()
        while llm.engine.has_work:
            llm.engine.step()
        check_idle(llm.engine)
        assert not llm._streams


def run(coroutine: Any) -> Any:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


def alone(prompt: list[int], params: SamplingParams) -> list[list[int]]:
    output = complete(make_engine(128, by_hash(VOCAB), eos=(0,)), prompt, params)
    return [c.token_ids for c in output.outputs]


async def read(stream: Any) -> dict[int, list[int]]:
    """Token ids by index; the last token of each has its reason, no other has."""
    tokens: dict[int, list[int]] = {}
    ended = set()
    async for news in stream:
        for token in news:
            assert token.index not in ended
            tokens.setdefault(token.index, []).append(token.token_id)
            if token.finish_reason is not None:
                ended.add(token.index)
    assert ended == set(tokens)
    return tokens


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("rate", [None, 50.0])
def test_tokens_of_many_streams(make_llm: Any, overlap: bool, rate: float | None) -> None:
    llm = make_llm(overlap=overlap, max_num_seqs=8)
    llm.max_wakeups_per_second = rate
    prompts = [[i, i + 1] for i in range(1, 9)]

    async def main() -> list[dict[int, list[int]]]:
        return await asyncio.gather(*(read(llm.open_stream([p], greedy(20, ignore_eos=True))) for p in prompts))

    for prompt, tokens in zip(prompts, run(main())):
        assert tokens == {0: alone(prompt, greedy(20, ignore_eos=True))[0]}


def test_several_prompts_and_completions_in_one_stream(make_llm: Any) -> None:
    llm = make_llm()
    params = SamplingParams(n=2, max_tokens=6, seed=3, ignore_eos=True, logprobs=0)

    async def main() -> tuple[dict[int, list[int]], int]:
        stream = llm.open_stream([[1, 2], [3, 4, 5]], params, "name")
        tokens = await read(stream)
        assert [r.request_id for r in stream.requests] == ["name-0", "name-1"]
        return tokens, stream.num_cached_tokens

    tokens, num_cached = run(main())
    first, second = alone([1, 2], params), alone([3, 4, 5], params)
    assert [tokens[i] for i in range(4)] == first + second and num_cached == 0


def test_logprobs_come_with_their_tokens(make_llm: Any) -> None:
    llm = make_llm()

    async def main() -> list[Any]:
        stream = llm.open_stream([[1, 2]], greedy(3, ignore_eos=True, logprobs=0))
        return [token async for news in stream for token in news]

    for i, token in enumerate(run(main())):
        assert list(token.logprobs) == [token.token_id] and token.logprobs[token.token_id].logprob == -(2.0 + i)


def test_a_step_is_one_call_into_the_event_loop(make_llm: Any) -> None:
    llm = make_llm(max_num_seqs=8)
    calls: list[int] = []
    deliver = llm._deliver
    llm._deliver = lambda items: (calls.append(len(items)), deliver(items))

    async def main() -> None:
        streams = [llm.open_stream([[i, 2]], greedy(10, ignore_eos=True)) for i in range(1, 9)]
        await asyncio.gather(*map(read, streams))

    run(main())
    assert sum(calls) == 80 and len(calls) <= len(llm.engine.runner.batches)


def test_a_late_reader_gets_all_at_once(make_llm: Any) -> None:
    llm = make_llm()

    async def main() -> list[list[Any]]:
        stream = llm.open_stream([[1, 2]], greedy(9, ignore_eos=True))
        while llm.engine.requests or not stream.requests:
            await asyncio.sleep(0.001)
        await asyncio.sleep(0.01)
        return [news async for news in stream]

    (news,) = run(main())
    assert [t.token_id for t in news] == alone([1, 2], greedy(9, ignore_eos=True))[0]


@pytest.mark.parametrize("overlap", [False, True])
def test_stop_ends_one_sequence_and_close_the_rest(make_llm: Any, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    steps = threading.Semaphore(0)
    llm.engine.runner.on_launch = lambda batch: steps.acquire(timeout=PATIENCE)

    async def main() -> None:
        stream = llm.open_stream([[1, 2]], SamplingParams(n=2, max_tokens=300, seed=1, ignore_eos=True))
        steps.release(6)
        seen: dict[int, int] = {}
        async for news in stream:
            for token in news:
                assert seen.get(1, 0) < 2 or token.index == 0, "a token of the stopped sequence"
                seen[token.index] = seen.get(token.index, 0) + 1
                if seen.get(1) == 2 and 1 not in stream._stopped:
                    stream.stop(1)
                    break
            steps.release(2)
            if seen[0] > 8:
                break
        first, second = stream.requests[0].sequences
        assert second.finish_reason == "stop" and first.finish_reason is None
        stream.close()
        steps.release(4)
        assert [t.index for news in [n async for n in stream] for t in news] in ([], [0], [0, 0])
        while llm.engine.requests:
            await asyncio.sleep(0.001)
        assert first.finish_reason == "abort"

    run(main())


def test_errors_reach_the_reader(make_llm: Any) -> None:
    llm = make_llm()

    async def main() -> None:
        def fail(batch: Any) -> None:
            raise MemoryError("no room")

        llm.engine.runner.on_launch = fail
        with pytest.raises(RuntimeError, match="no room"):
            await read(llm.open_stream([[1, 2]], greedy(3)))
        llm.engine.runner.on_launch = None
        first = llm.open_stream([[1, 2]], greedy(3, ignore_eos=True), "a")
        with pytest.raises(ValueError, match="request_id"):
            await read(llm.open_stream([[3, 4], [1, 2]], greedy(300, ignore_eos=True), "a"))
        assert await read(first) == {0: alone([1, 2], greedy(3, ignore_eos=True))[0]}

    run(main())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_cannot_go_on_says_so(make_llm: Any) -> None:
    llm = make_llm()

    async def main() -> None:
        def die(batch: Any) -> None:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

        llm.engine.runner.on_launch = die
        with pytest.raises(RuntimeError, match="illegal memory access"):
            await read(llm.open_stream([[1, 2]], greedy(3)))
        while llm.is_running:
            await asyncio.sleep(0.001)
        with pytest.raises(RuntimeError, match=r"the engine cannot go on: .*illegal memory access"):
            llm.open_stream([[1, 2]], greedy(3))

    run(main())
