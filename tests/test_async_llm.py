"""The online front over an engine with a fake model, in its own thread."""

import asyncio
import itertools
import threading

import pytest
from engine.fakes import by_hash, check_idle, complete, greedy, make_engine
from engine.tokenizer import byte_tokenizer

from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

async_module = pytest.importorskip("nanovllm.async_llm", reason="needs torch and the model configs")
overlaps = pytest.mark.parametrize("overlap", [False, True])
PATIENCE = 30  # seconds until a test that hangs fails


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch):
    """AsyncLLM(...) around an engine of fakes.make_engine(**options); all are shut down after the test."""
    made = []

    def make(**options: object) -> async_module.AsyncLLM:
        options = {"tokenizer": byte_tokenizer(), "vocab_size": 300, "eos": (0,)} | options
        engine = make_engine(64, by_hash(300), **options)
        monkeypatch.setattr(async_module, "build_engine", lambda config: (engine, greedy(5)))
        made.append(async_module.AsyncLLM("fake"))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def run(coroutine) -> object:
    return asyncio.run(asyncio.wait_for(coroutine, PATIENCE))


async def collect(llm, prompt, params, request_id: str | None = None) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, request_id)]


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    return complete(make_engine(64, by_hash(300), eos=(0,)), prompt, params).token_ids


def gate(llm) -> threading.Semaphore:
    """From now on the engine launches a step only for a release() of this."""
    steps = threading.Semaphore(0)
    llm.engine.runner.on_launch = lambda batch: steps.acquire(timeout=PATIENCE)
    return steps


def shut_down_and_check(llm) -> None:
    llm.engine.runner.on_launch = llm.engine.runner.on_collect = None
    llm.shutdown()
    while llm.engine.has_work:
        llm.engine.step()
    check_idle(llm.engine)


@overlaps
def test_concurrent_requests_get_their_own_outputs(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap, max_num_seqs=4)
    params = [greedy(1 + i % 7, ignore_eos=True) for i in range(12)]

    async def main() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(llm, [i, i + 1], p) for i, p in enumerate(params)))

    for i, outputs in enumerate(run(main())):
        assert outputs[-1].finished and not any(o.finished for o in outputs[:-1])
        assert outputs[-1].token_ids == alone([i, i + 1], params[i])
        for before, after in itertools.pairwise(outputs):  # cumulative
            assert after.token_ids[: len(before.token_ids)] == before.token_ids and after.text.startswith(before.text)
    shut_down_and_check(llm)


def test_text_prompts_and_default_params(make_llm) -> None:
    llm = make_llm()
    outputs = run(collect(llm, "the cat", None))
    expected = alone(byte_tokenizer().encode("the cat"), greedy(5))
    assert outputs[-1].token_ids == expected and outputs[-1].prompt == "the cat"


@pytest.mark.parametrize(
    "prompt, form", [("the cat", None), ([5], StructuredOutputsParams(choice=["a", "b"]))], ids=["text", "form"]
)
def test_a_slow_check_leaves_the_event_loop_free(make_llm, monkeypatch: pytest.MonkeyPatch, prompt, form) -> None:
    if form is not None:
        pytest.importorskip("llguidance", reason="forms need llguidance")
    llm = make_llm()
    check, loop_goes_on = llm.engine.check_request, threading.Event()

    def slowly(*args: object) -> object:
        assert loop_goes_on.wait(PATIENCE)
        return check(*args)

    async def main() -> list[RequestOutput]:
        reader = asyncio.create_task(collect(llm, prompt, greedy(5, structured_outputs=form)))
        await asyncio.sleep(0)  # the reader starts
        loop_goes_on.set()
        return await reader

    monkeypatch.setattr(llm.engine, "check_request", slowly)
    assert run(main())[-1].finished
    shut_down_and_check(llm)


@overlaps
def test_abort_gives_a_last_output(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    params = greedy(200, ignore_eos=True)

    async def main() -> list[RequestOutput]:
        steps = gate(llm)
        steps.release(4)
        outputs = []
        async for output in llm.generate([1, 2], params, "a"):
            outputs.append(output)
            if len(outputs) == 1:
                await llm.abort("a")
                await llm.abort("unknown")
                steps.release(2)
        return outputs

    outputs = run(main())
    assert outputs[-1].finish_reason == "abort" and outputs[-1].finished
    assert outputs[-1].token_ids == alone([1, 2], params)[: len(outputs[-1].token_ids)]
    shut_down_and_check(llm)


@overlaps
def test_leaving_early_frees_the_blocks_within_two_steps(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    other_blocks = []

    async def main() -> None:
        steps = gate(llm)
        other = asyncio.create_task(collect(llm, [7, 8], greedy(40, ignore_eos=True), "other"))
        await asyncio.sleep(0)
        steps.release(4)
        stream = llm.generate([1, 2, 3, 4, 5], greedy(200, ignore_eos=True), "early")
        async for _ in stream:
            break
        await stream.aclose()  # as `break` does when the generator is collected
        done = threading.Event()
        llm._commands.put(done.set)  # after the abort
        steps.release()  # the step that may be waiting at the gate
        while not done.is_set():
            await asyncio.sleep(0.001)
        before = len(llm.engine.runner.batches)
        steps.release(2)
        while len(llm.engine.runner.batches) < before + 2:
            await asyncio.sleep(0.001)
        (seq,) = llm.engine.requests["other"].sequences
        other_blocks.append((set(llm.engine.scheduler.block_manager.used_block_ids), set(seq.block_table)))
        llm.engine.runner.on_launch = None
        steps.release(5)
        await other

    run(main())
    used, of_other = other_blocks[0]
    assert used <= of_other
    shut_down_and_check(llm)
    assert not llm._streams


def test_cancelled_task_ends_its_request(make_llm) -> None:
    llm = make_llm()

    async def main() -> None:
        steps = gate(llm)
        task = asyncio.create_task(collect(llm, [1, 2], greedy(200, ignore_eos=True), "a"))
        await asyncio.sleep(0)
        steps.release(3)
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        llm.engine.runner.on_launch = None
        steps.release(5)
        outputs = await collect(llm, [3, 4], greedy(3))
        assert outputs[-1].token_ids == alone([3, 4], greedy(3))

    run(main())
    assert not llm.engine.requests and not llm._streams
    shut_down_and_check(llm)


@overlaps
@pytest.mark.parametrize("where", ["on_launch", "on_collect"])
def test_failed_step_reaches_every_request_and_the_engine_goes_on(make_llm, overlap: bool, where: str) -> None:
    llm = make_llm(overlap=overlap)

    def fail(*_: object) -> None:
        if len(llm.engine.runner.batches) >= 4:
            raise MemoryError("no room")

    async def main() -> list:
        setattr(llm.engine.runner, where, fail)
        prompts = [collect(llm, [i, 2], greedy(200, ignore_eos=True)) for i in range(3)]
        return await asyncio.gather(*prompts, return_exceptions=True)

    for error in run(main()):
        assert isinstance(error, RuntimeError) and "a step failed, and with it this request" in str(error)
        assert isinstance(error.__cause__, MemoryError)
    assert llm.is_running
    setattr(llm.engine.runner, where, None)
    assert run(collect(llm, [3, 4], greedy(3)))[-1].token_ids == alone([3, 4], greedy(3))
    shut_down_and_check(llm)


def test_output_that_fails_does_not_end_the_engine(make_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    output = llm.engine.output

    def fail_once(request: object) -> RequestOutput:
        monkeypatch.setattr(llm.engine, "output", output)
        raise ValueError("broken output")

    monkeypatch.setattr(llm.engine, "output", fail_once)
    with pytest.raises(RuntimeError, match="broken output"):
        run(collect(llm, [1, 2], greedy(20, ignore_eos=True)))
    assert llm.is_running and run(collect(llm, [3, 4], greedy(3)))[-1].finished
    shut_down_and_check(llm)


@overlaps
def test_shutdown_ends_running_requests(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    steps = gate(llm)

    async def main() -> list:
        tasks = [asyncio.create_task(collect(llm, [i, 2], greedy(200, ignore_eos=True))) for i in range(3)]
        await asyncio.sleep(0)
        steps.release(3)
        ending = asyncio.get_running_loop().run_in_executor(None, llm.shutdown)
        await asyncio.sleep(0.01)
        llm.engine.runner.on_launch = None
        steps.release(5)
        await ending
        return await asyncio.gather(*tasks, return_exceptions=True)

    for error in run(main()):
        assert isinstance(error, RuntimeError) and "shut down" in str(error)
    llm.shutdown()
    assert not llm.is_running
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        run(collect(llm, [1], greedy(1)))
    shut_down_and_check(llm)


def test_request_id_in_use_is_refused_and_the_first_one_goes_on(make_llm) -> None:
    llm = make_llm()

    async def main() -> None:
        steps = gate(llm)
        first = asyncio.create_task(collect(llm, [1, 2], greedy(6, ignore_eos=True), "a"))
        await asyncio.sleep(0)
        steps.release(2)
        second = asyncio.create_task(collect(llm, [3, 4], greedy(6), "a"))
        await asyncio.sleep(0)
        steps.release(50)
        with pytest.raises(ValueError, match="request_id: expected one not in use, got 'a'"):
            await second
        assert (await first)[-1].token_ids == alone([1, 2], greedy(6, ignore_eos=True))
        llm.engine.runner.on_launch = None
        assert (await collect(llm, [3, 4], greedy(6), "a"))[-1].token_ids == alone([3, 4], greedy(6))

    run(main())
    shut_down_and_check(llm)


def test_b16_bad_request_fails_alone(make_llm) -> None:
    llm = make_llm()

    async def main() -> list:
        prompts = ([1, 2], [], [999], [3, 4], [1] * 400, None)
        return await asyncio.gather(*(collect(llm, p, greedy(4)) for p in prompts), return_exceptions=True)

    good, empty, unknown, good_too, too_long, other = run(main())
    assert [o[-1].token_ids for o in (good, good_too)] == [alone([1, 2], greedy(4)), alone([3, 4], greedy(4))]
    assert "prompt is empty" in str(empty) and "got 999" in str(unknown) and "400 tokens needs" in str(too_long)
    assert [type(e) for e in (empty, unknown, too_long, other)] == [ValueError] * 3 + [TypeError]
    shut_down_and_check(llm)


def test_reader_whose_loop_is_gone_does_no_harm(make_llm) -> None:
    llm = make_llm()
    steps = gate(llm)

    async def first_only() -> None:
        stream = llm.generate([1, 2], greedy(50, ignore_eos=True))
        steps.release(2)
        await anext(stream)

    run(first_only())
    llm.engine.runner.on_launch = None
    steps.release(5)
    assert run(collect(llm, [3, 4], greedy(3)))[-1].token_ids == alone([3, 4], greedy(3))
    shut_down_and_check(llm)


def test_a_bad_call_raises_in_the_caller_and_leaves_the_engine_running(make_llm) -> None:
    llm = make_llm()

    async def main() -> None:
        for request_id in ([], {}, 5, None):
            with pytest.raises(TypeError, match="request_id: expected a string, got"):
                await llm.abort(request_id)
        with pytest.raises(TypeError, match=r"request_id: expected a string, got \[\]"):
            await collect(llm, [1, 2], greedy(3), [])
        for params in ({"temperature": 0}, 5, False):
            kind = type(params).__name__
            with pytest.raises(TypeError, match=f"sampling_params: expected SamplingParams, got {kind}"):
                await collect(llm, [1, 2], params)
        assert (await collect(llm, [1, 2], greedy(3)))[-1].token_ids == alone([1, 2], greedy(3))

    run(main())
    shut_down_and_check(llm)


# Pause, and calls into the engine's thread


def wait(future) -> object:
    return future.result(timeout=PATIENCE)


async def until(condition) -> None:
    while not condition():
        await asyncio.sleep(0.001)


def test_call_runs_in_the_engine_thread_and_gives_results_and_errors(make_llm) -> None:
    llm = make_llm()
    assert wait(llm.call(lambda: threading.current_thread().name)) == "nanovllm-engine"
    with pytest.raises(ZeroDivisionError):
        wait(llm.call(lambda: 1 // 0))
    assert llm.is_running and run(collect(llm, [1, 2], greedy(2)))[-1].finished
    llm.shutdown()
    with pytest.raises(RuntimeError, match="the engine was shut down"):
        llm.call(lambda: None)


@overlaps
def test_paused_engine_makes_the_steps_it_is_told_to_and_no_other(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    batches = llm.engine.runner.batches

    async def main() -> list[RequestOutput]:
        wait(llm.set_paused(True))
        task = asyncio.create_task(collect(llm, [1, 2], greedy(30, ignore_eos=True)))
        await until(lambda: llm.engine.requests)
        assert wait(llm.call(lambda: len(batches))) == 0
        for count, total in ((1, 1), (1, 2), (3, 5)):
            assert wait(llm.step_paused(count)) == count
            await until(lambda total=total: len(batches) >= total)
            await asyncio.sleep(0.02)
            assert wait(llm.call(lambda: len(batches))) == total
        wait(llm.set_paused(False))
        return await task

    outputs = run(main())
    assert outputs[-1].token_ids == alone([1, 2], greedy(30, ignore_eos=True))
    shut_down_and_check(llm)


@overlaps
def test_steps_left_over_when_the_work_ends_are_forgotten(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    assert wait(llm.step_paused(5)) == 0  # not paused

    async def main() -> None:
        wait(llm.set_paused(True))
        assert wait(llm.step_paused(5)) == 0  # nothing to do
        first = asyncio.create_task(collect(llm, [1, 2], greedy(2, ignore_eos=True)))
        await until(lambda: llm.engine.requests)
        wait(llm.step_paused(50))
        await first
        done = len(llm.engine.runner.batches)
        second = asyncio.create_task(collect(llm, [1, 2], greedy(2, ignore_eos=True)))
        await until(lambda: llm.engine.requests)
        await asyncio.sleep(0.02)
        assert len(llm.engine.runner.batches) == done
        wait(llm.set_paused(False))
        await second

    run(main())
    with pytest.raises(ValueError, match="num_steps: expected an integer >= 1, got 0"):
        llm.step_paused(0)
    shut_down_and_check(llm)


@overlaps
def test_pause_holds_neither_aborts_nor_shutdown(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)

    async def main() -> list:
        wait(llm.set_paused(True))
        tasks = [asyncio.create_task(collect(llm, [i, 2], greedy(200, ignore_eos=True), f"r{i}")) for i in range(3)]
        await until(lambda: len(llm.engine.requests) == 3)
        assert wait(llm.step_paused(5)) == 5
        await until(lambda: len(llm.engine.runner.batches) == 5)
        await llm.abort("r0")
        tasks[1].cancel()
        await until(lambda: llm.engine.requests.keys() == {"r2"})
        assert (await tasks[0])[-1].finish_reason == "abort"
        await asyncio.get_running_loop().run_in_executor(None, llm.shutdown)
        return await asyncio.gather(*tasks[1:], return_exceptions=True)

    cancelled, ended = run(main())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(ended, RuntimeError) and "shut down" in str(ended)
    shut_down_and_check(llm)
