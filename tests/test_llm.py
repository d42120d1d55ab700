"""The offline front over an engine with a fake model."""

import copy
import dataclasses
import os
import pickle
import signal
import threading
import time

import numpy as np
import pytest
from engine.fakes import by_hash, check_idle, complete, greedy, make_engine, run_all, scripted
from engine.tokenizer import byte_tokenizer

from nanovllm.outputs import RequestOutput
from nanovllm.sampling_params import SamplingParams, StructuredOutputsParams

llm_module = pytest.importorskip("nanovllm.llm", reason="needs torch and the model configs")
overlaps = pytest.mark.parametrize("overlap", [False, True])


@pytest.fixture
def make_llm(monkeypatch: pytest.MonkeyPatch):
    """LLM(...) around an engine of fakes.make_engine(**options)."""

    def make(choose: object = None, num_blocks: int = 64, **options: object) -> llm_module.LLM:
        options = {"tokenizer": byte_tokenizer(), "vocab_size": 300, "eos": (0,)} | options
        engine = make_engine(num_blocks, choose or by_hash(300), **options)
        monkeypatch.setattr(llm_module, "build_engine", lambda config: (engine, greedy(5)))
        return llm_module.LLM("fake")

    return make


def alone(prompt: list[int], params: SamplingParams) -> list[int]:
    return complete(make_engine(64, by_hash(300), eos=(0,)), prompt, params).token_ids


def settle(llm: llm_module.LLM) -> None:
    """Collects a surplus step that may still be in flight, and checks that nothing else is left."""
    run_all(llm.engine)


@overlaps
def test_results_are_in_prompt_order(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap, max_num_seqs=3)
    prompts = [[i, i + 1] for i in range(10)]
    params = [greedy(1 + (7 * i) % 9, ignore_eos=True) for i in range(10)]
    for _ in range(2):
        outputs = llm.generate(prompts, params, use_tqdm=False)
        assert [o.prompt_token_ids for o in outputs] == prompts
        for prompt, p, output in zip(prompts, params, outputs):
            assert output.token_ids == alone(prompt, p) and len(output.token_ids) == p.max_tokens
            assert output.finished and output["finish_reason"] == "length"
    settle(llm)


def test_prompts_may_be_one_or_several_text_or_ids(make_llm) -> None:
    llm = make_llm()
    ids = byte_tokenizer().encode("the cat")
    expected = alone(ids, greedy(5))
    for prompts, text in (
        ("the cat", "the cat"),
        (["the cat"], "the cat"),
        (ids, None),
        ([ids], None),
        ([tuple(ids)], None),
        (list(np.array(ids)), None),
        ([list(np.array(ids, np.uint16))], None),
    ):
        (output,) = llm.generate(prompts, use_tqdm=False)
        assert output.token_ids == expected and output.text == byte_tokenizer().decode(expected, True)
        assert output.prompt == text
    assert llm.generate([], use_tqdm=False) == []


@pytest.mark.parametrize(
    "bad, error, text",
    [
        ([], ValueError, r"prompts\[1\]: prompt is empty"),
        ("", ValueError, r"prompts\[1\]: prompt is empty"),
        (
            [1] * 50,
            ValueError,
            r"prompts\[1\]: prompt of 50 tokens needs 13 KV-cache blocks of 4 tokens, the pool has 8",
        ),
        ([300], ValueError, r"prompts\[1\]: prompt: expected token ids in \[0, 300\), got 300"),
        (["a"], TypeError, r"prompts\[1\]: prompt: expected a string or a list of token ids"),
        (7, TypeError, r"prompts\[1\]: prompt: expected a string or a list of token ids, got int"),
        ("\ud800", ValueError, r"prompts\[1\]: prompt: expected valid text, got a lone surrogate at index 0"),
        ([True], TypeError, r"prompts\[1\]: prompt: .* got a list with bool at \[0\]"),
    ],
)
def test_b16_f5_bad_prompt_is_refused_before_anything_is_queued(make_llm, bad: object, error: type, text: str) -> None:
    llm = make_llm(num_blocks=8)
    with pytest.raises(error, match=text):
        llm.generate([[1, 2], bad, [3, 4]], use_tqdm=False)
    check_idle(llm.engine)
    assert not llm.engine.runner.batches
    outputs = llm.generate([[1, 2], [3, 4]], use_tqdm=False)
    assert [o.token_ids for o in outputs] == [alone([1, 2], greedy(5)), alone([3, 4], greedy(5))]


def test_sampling_params_must_match_the_prompts(make_llm) -> None:
    llm = make_llm()
    with pytest.raises(ValueError, match="sampling_params: expected one SamplingParams or 2 of them, got 3"):
        llm.generate([[1], [2]], [greedy(1)] * 3, use_tqdm=False)
    for bad, got in (
        ([greedy(1), {"temperature": 0}], r"a list with dict at \[1\]"),
        ({"temperature": 0}, "dict"),
        ("greedy", "str"),
        (SamplingParams, "the class SamplingParams"),
        (5, "int"),
    ):
        with pytest.raises(TypeError, match=f"sampling_params: expected one SamplingParams or 2 of them, got {got}"):
            llm.generate([[1], [2]], bad, use_tqdm=False)


@overlaps
def test_ctrl_c_ends_the_requests_and_leaves_a_usable_engine(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    handler = signal.getsignal(signal.SIGINT)
    finished_steps = []

    def interrupt(batch: object) -> None:
        if len(llm.engine.runner.batches) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            finished_steps.append(True)  # the step is not torn apart

    llm.engine.runner.on_launch = interrupt
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2], [3, 4]], greedy(30, ignore_eos=True), use_tqdm=False)
    assert finished_steps == [True] and len(llm.engine.runner.batches) == 4
    assert signal.getsignal(signal.SIGINT) is handler
    llm.engine.runner.on_launch = None
    (output,) = llm.generate([[5, 6]], greedy(4), use_tqdm=False)
    assert output.prompt_token_ids == [5, 6] and output.token_ids == alone([5, 6], greedy(4))
    settle(llm)


@overlaps
def test_ctrl_c_in_a_stream_comes_after_the_step(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    finished_steps = []

    def interrupt(batch: object) -> None:
        if len(llm.engine.runner.batches) == 3:
            os.kill(os.getpid(), signal.SIGINT)
            finished_steps.append(True)

    llm.engine.runner.on_launch = interrupt
    with pytest.raises(KeyboardInterrupt):
        for _ in llm.stream([1, 2], greedy(30, ignore_eos=True)):
            pass
    assert finished_steps == [True] and not llm.engine.requests
    settle(llm)


def test_ctrl_c_while_requests_are_queued_leaves_none(make_llm, monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm()
    add = llm.engine.add_checked_request

    def interrupt(*args: object, **options: object) -> object:
        if len(llm.engine.requests) == 3:
            os.kill(os.getpid(), signal.SIGINT)
        return add(*args, **options)

    monkeypatch.setattr(llm.engine, "add_checked_request", interrupt)
    with pytest.raises(KeyboardInterrupt):
        llm.generate([[1, 2]] * 9, greedy(3), use_tqdm=False)
    assert not llm.engine.requests and not llm.engine.runner.batches
    settle(llm)


@pytest.mark.parametrize("ignored", [False, True])
def test_a_program_keeps_its_own_handling_of_ctrl_c(make_llm, ignored: bool) -> None:
    llm, seen = make_llm(), []
    llm.engine.runner.on_launch = lambda batch: os.kill(os.getpid(), signal.SIGINT)
    before = signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else lambda *_: seen.append(1))
    try:
        (output,) = llm.generate([[1, 2]], greedy(3, ignore_eos=True), use_tqdm=False)
        assert len(list(llm.stream([3, 4], greedy(2, ignore_eos=True)))) == 2
    finally:
        signal.signal(signal.SIGINT, before)
    assert output.token_ids == alone([1, 2], greedy(3, ignore_eos=True))
    assert len(seen) == (0 if ignored else 5)


def test_another_calls_failed_step_reaches_a_stream(make_llm) -> None:
    llm = make_llm()
    stream = llm.stream([1, 2], greedy(30, ignore_eos=True))
    next(stream)

    def fail(batch: object) -> None:
        raise MemoryError("no room")

    llm.engine.runner.on_launch = fail
    with pytest.raises(MemoryError):
        llm.generate([[3, 4]], greedy(3), use_tqdm=False)
    with pytest.raises(RuntimeError, match="a step failed, and with it this request: MemoryError") as caught:
        next(stream)
    assert isinstance(caught.value.__cause__, MemoryError)


def test_outputs_are_plain_data(make_llm) -> None:
    """They go into JSON, and to other processes."""
    llm = make_llm()
    for params in (greedy(3), greedy(3, logprobs=1)):
        (output,) = llm.generate([[1, 2]], params, use_tqdm=False)
        assert dataclasses.asdict(output)["prompt_token_ids"] == [1, 2]
        for other in (pickle.loads(pickle.dumps(output)), copy.deepcopy(output)):
            assert other == output and type(other.prompt_token_ids) is list


def test_outputs_of_a_form_are_plain_data(make_llm) -> None:
    pytest.importorskip("llguidance", reason="forms need llguidance")
    params = greedy(9, structured_outputs=StructuredOutputsParams(choice=["cat"]))
    llm = make_llm(scripted(*byte_tokenizer().encode("cat"), then=0))
    (output,) = llm.generate([[1, 2]], params, use_tqdm=False)
    assert output.text == "cat" and pickle.loads(pickle.dumps(output)) == output


@overlaps
@pytest.mark.parametrize("where", ["on_launch", "on_collect"])
def test_b15_failed_step_does_not_leak_into_the_next_call(make_llm, overlap: bool, where: str) -> None:
    llm = make_llm(overlap=overlap)

    def fail(*_: object) -> None:
        if len(llm.engine.runner.batches) >= 3:
            raise RuntimeError("broken kernel")

    setattr(llm.engine.runner, where, fail)
    with pytest.raises(RuntimeError, match="broken kernel"):
        llm.generate([[1, 2], [3, 4]], greedy(30, ignore_eos=True), use_tqdm=False)
    check_idle(llm.engine)
    setattr(llm.engine.runner, where, None)
    (output,) = llm.generate([[5, 6]], greedy(4), use_tqdm=False)
    assert output.prompt_token_ids == [5, 6] and output.token_ids == alone([5, 6], greedy(4))
    settle(llm)


def pieces(outputs: list[RequestOutput], index: int = 0) -> tuple[str, list[int]]:
    completions = [o.outputs[index] for o in outputs]
    return "".join(c.text for c in completions), [t for c in completions for t in c.token_ids]


@overlaps
@pytest.mark.parametrize("stop", [None, "on"])
def test_stream_yields_increments_that_add_up(make_llm, overlap: bool, stop: str | None) -> None:
    text = "the cat sat 日本語 on the mat"
    llm = make_llm(scripted(*byte_tokenizer().encode(text), 0), overlap=overlap)
    params = greedy(60, stop=stop, logprobs=0)
    outputs = list(llm.stream("go", params))
    assert len(outputs) > 5
    (whole,) = llm.generate("go", params, use_tqdm=False)
    assert whole.text == (text if stop is None else "the cat sat 日本語 ")
    assert pieces(outputs) == (whole.text, whole.token_ids)
    assert [e for o in outputs for e in o.logprobs] == whole.logprobs
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    assert outputs[-1].finish_reason == "stop" and outputs[0].finish_reason is None
    assert all("�" not in o.text and o.text == o.outputs[0].text for o in outputs)
    settle(llm)


@overlaps
def test_stream_of_several_completions(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    params = SamplingParams(n=2, seed=3, max_tokens=6, ignore_eos=True)
    outputs = list(llm.stream([1, 2], params))
    (whole,) = llm.generate([[1, 2]], params, use_tqdm=False)
    for i in range(2):
        assert pieces(outputs, i) == (whole.outputs[i].text, whole.outputs[i].token_ids)
    settle(llm)


@overlaps
def test_abandoned_stream_ends_its_request(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap)
    for _ in llm.stream([1, 2], greedy(30, ignore_eos=True)):
        break
    assert not llm.engine.requests
    for _ in range(2):
        llm.engine.step()
    check_idle(llm.engine)


@overlaps
def test_generate_between_two_yields_of_a_stream(make_llm, overlap: bool) -> None:
    """The stream's request may run, and end, in the steps of the other call: neither loses anything."""
    llm = make_llm(overlap=overlap)
    params = greedy(8, ignore_eos=True)
    stream = llm.stream([1, 2], params)
    outputs = [next(stream)]
    others = llm.generate([[3, 4], [5, 6]], greedy(20, ignore_eos=True), use_tqdm=False)
    assert [o.token_ids for o in others] == [alone([i, i + 1], greedy(20, ignore_eos=True)) for i in (3, 5)]
    outputs += stream
    assert pieces(outputs)[1] == alone([1, 2], params)
    assert [o.finished for o in outputs] == [False] * (len(outputs) - 1) + [True]
    settle(llm)


def test_request_aborted_inside_generate_ends_it(make_llm) -> None:
    llm = make_llm()

    def abort(batch: object) -> None:
        if len(llm.engine.runner.batches) == 2:
            llm.engine.abort("0")

    llm.engine.runner.on_launch = abort
    outputs = llm.generate([[1, 2], [3, 4]], greedy(6, ignore_eos=True), use_tqdm=False)
    assert [o.finish_reason for o in outputs] == ["abort", "length"]
    settle(llm)


def test_chat_renders_the_template(make_llm) -> None:
    llm = make_llm()
    messages = [{"role": "user", "content": "hello"}]
    rendered = byte_tokenizer().encode("user: hello\nassistant: ")
    (output,) = llm.chat(messages, use_tqdm=False)
    assert output.prompt_token_ids == rendered
    outputs = llm.chat([messages, messages], use_tqdm=False)
    assert [o.token_ids for o in outputs] == [output.token_ids] * 2
    for bad, text in (
        ([], "at least one message"),
        ([{"role": "user", "content": "a\udcff"}], r"messages\[0\].content: expected valid text.* at index 1"),
        ([{"content": "x"}], r"messages\[0\]: expected a dict with \"role\""),
    ):
        with pytest.raises(ValueError, match=text):
            llm.chat(bad, use_tqdm=False)
    for wrong in ("hi", {"role": "user", "content": "hi"}, None):
        with pytest.raises(TypeError, match=r"messages: expected one conversation .* got (str|dict|NoneType)"):
            llm.chat(wrong, use_tqdm=False)
    with pytest.raises(ValueError, match="chat: the model has no tokenizer; pass token ids"):
        make_llm(tokenizer=None).chat(messages, use_tqdm=False)
    with pytest.raises(ValueError, match="chat template refused the messages: no system"):
        llm.chat(messages, use_tqdm=False, chat_template="{{ raise_exception('no system') }}")
    llm.tokenizer.chat_template, template = None, llm.tokenizer.chat_template
    try:
        with pytest.raises(ValueError, match="no chat template"):
            llm.chat(messages, use_tqdm=False)
    finally:
        llm.tokenizer.chat_template = template


def test_exit_is_idempotent_and_later_use_says_so(make_llm) -> None:
    with make_llm() as llm:
        llm.generate([[1]], use_tqdm=False)
    llm.exit()
    with pytest.raises(RuntimeError, match=r"ended by exit\(\)"):
        llm.generate([[1]], use_tqdm=False)
    with pytest.raises(AttributeError, match="no attribute 'generat'"):
        _ = llm.generat


def test_exit_ends_a_call_of_another_thread_after_its_step(make_llm) -> None:
    llm = make_llm()
    engine, in_step, go_on, errors = llm.engine, threading.Event(), threading.Event(), []

    def wait(batch: object) -> None:
        in_step.set()
        assert go_on.wait(30)

    def call() -> None:
        with pytest.raises(RuntimeError, match=r"ended by exit\(\)") as caught:
            llm.generate([[1, 2]], greedy(30, ignore_eos=True), use_tqdm=False)
        errors.append(caught.value)

    engine.runner.on_launch = wait
    caller, leaver = threading.Thread(target=call), threading.Thread(target=llm.exit)
    caller.start()
    assert in_step.wait(30)
    leaver.start()
    while "engine" in llm.__dict__:
        time.sleep(0.001)
    go_on.set()
    caller.join(30)
    leaver.join(30)
    assert len(errors) == 1 and len(engine.runner.batches) == 1 and not engine.requests


def test_stream_left_open_ends_quietly_after_exit(make_llm) -> None:
    llm = make_llm()
    pieces = llm.stream([1, 2], greedy(9, ignore_eos=True))
    next(pieces)
    llm.exit()
    pieces.close()


def test_e12_unknown_option_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="unknown option 'tensor_parallel'"):
        llm_module.LLM("fake", tensor_parallel=2)


def test_progress_bar_counts_prompts(make_llm, capsys: pytest.CaptureFixture[str]) -> None:
    make_llm().generate([[1], [2]], greedy(3))
    assert "2/2" in capsys.readouterr().err


@pytest.mark.parametrize("prompts", [None, 5, {"a": 1}, {1, 2}, b"text"])
def test_prompts_of_another_kind_are_refused(make_llm, prompts: object) -> None:
    llm = make_llm()
    kind = type(prompts).__name__
    with pytest.raises(TypeError, match=f"prompts: expected one prompt or a list of them, got {kind}"):
        llm.generate(prompts, use_tqdm=False)
    settle(llm)


def test_prompts_may_come_from_a_generator(make_llm) -> None:
    outputs = make_llm().generate(([i, 2] for i in (3, 4)), greedy(3), use_tqdm=False)
    assert [o.token_ids for o in outputs] == [alone([3, 2], greedy(3)), alone([4, 2], greedy(3))]


@overlaps
def test_calls_from_several_threads_take_turns(make_llm, overlap: bool) -> None:
    llm = make_llm(overlap=overlap, max_num_seqs=3)
    inside, most = [], []

    def watch(*_: object) -> None:
        most.append(len(inside))
        inside.append(None)
        time.sleep(0.001)  # another thread runs now, and would be seen inside
        inside.pop()

    llm.engine.runner.on_launch = watch
    results: dict[int, list[list[int]]] = {}

    def work(i: int) -> None:
        if i == 0:
            results[i] = [[t for o in llm.stream([i, 2], greedy(9)) for t in o.token_ids]]
        else:
            results[i] = [o.token_ids for o in llm.generate([[i, 2], [i, 3]], greedy(9), use_tqdm=False)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert set(most) == {0}
    assert results == {0: [alone([0, 2], greedy(9))]} | {
        i: [alone([i, 2], greedy(9)), alone([i, 3], greedy(9))] for i in (1, 2, 3)
    }
    llm.engine.runner.on_launch = None
    settle(llm)
