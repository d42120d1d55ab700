"""The engine over a fake model: stopping, results, text, logprobs, ids and seeds."""

from types import SimpleNamespace

import pytest
from engine.fakes import complete, greedy, make_engine, run_all, scripted
from engine.tokenizer import byte_tokenizer

from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.sampling_params import SamplingParams

overlaps = pytest.mark.parametrize("overlap", [False, True])


def text_engine(text: str, end: tuple[int, ...] = (0,), **options: object) -> LLMEngine:
    """An engine whose model always writes text, then `end`."""
    tokenizer = byte_tokenizer()
    choose = scripted(*tokenizer.encode(text), *end, then=2)
    return make_engine(64, choose, tokenizer=tokenizer, vocab_size=300, eos=(0,), **options)


def test_f3_eos_ids_are_the_union_of_all_configs() -> None:
    build = pytest.importorskip("nanovllm.engine.build", reason="needs torch and the model configs")
    holder = SimpleNamespace
    ids = build.eos_token_ids(holder(eos_token_id=[3, 5]), holder(eos_token_id=3), holder(eos_token_id=7))
    assert ids == {3, 5, 7}
    assert build.eos_token_ids(None, holder(eos_token_id=None), holder()) == frozenset()


@overlaps
def test_f3_every_eos_id_stops(overlap: bool) -> None:
    engine = make_engine(16, scripted(8, 5, 8), eos=(3, 5), overlap=overlap)
    output = complete(engine, [1, 2], greedy(9))
    assert (output.token_ids, output.finish_reason, output.outputs[0].stop_reason) == ([8, 5], "stop", None)
    output = complete(engine, [1, 2], greedy(9, ignore_eos=True))
    assert (output.token_ids[:4], output.finish_reason) == ([8, 5, 8, 7], "length")
    output = complete(engine, [1, 2], greedy(9, stop_token_ids=[8]))
    assert (output.token_ids, output.finish_reason, output.outputs[0].stop_reason) == ([8], "stop", 8)
    output = complete(engine, [1, 2], greedy(9, stop_token_ids=[7], ignore_eos=True))
    assert (output.token_ids, output.finish_reason, output.outputs[0].stop_reason) == ([8, 5, 8, 7], "stop", 7)


def test_f5_empty_prompt_is_refused() -> None:
    engine = text_engine("x")
    for prompt in ("", []):
        with pytest.raises(ValueError, match="prompt is empty"):
            engine.add_request(prompt, greedy(1))
    assert not engine.has_work and not engine.requests


@overlaps
def test_f8_length_and_stop_keep_every_sampled_token(overlap: bool) -> None:
    engine = make_engine(64, scripted(8, 9, 5), eos=(5,), overlap=overlap)
    for wave in range(2):
        long = [engine.add_request([i + 1, wave], greedy(2)) for i in range(3)]
        stopped = [engine.add_request([i + 1, wave, 4], greedy(9)) for i in range(3)]
        run_all(engine)
        for request in long:
            output = engine.output(request)
            assert (output.token_ids, output.finish_reason) == ([8, 9], "length")
        for request in stopped:
            output = engine.output(request)
            assert (output.token_ids, output.finish_reason) == ([8, 9, 5], "stop")  # the EOS token is kept


def test_f9_seed_does_not_depend_on_the_batch() -> None:
    """The sampler's key is of the request's seed; without one, of the engine's seed and the request's number."""

    def keys(engine: LLMEngine, seeds: list[int | None]) -> list[list[int]]:
        requests = [engine.add_request([i, 2, 3], SamplingParams(seed=s, n=2)) for i, s in enumerate(seeds)]
        run_all(engine)
        return [[s.seed for s in r.sequences] for r in requests]

    alone = keys(make_engine(64), [1])[0]
    together = keys(make_engine(64, overlap=True), [None, 1, 2, 1])
    assert together[1] == together[3] == alone and alone[0] != alone[1]
    assert len({k for pair in together for k in pair}) == 6
    assert keys(make_engine(64), [None, None]) == keys(make_engine(64), [None, None])
    assert keys(make_engine(64, seed=1), [None]) != keys(make_engine(64, seed=2), [None])
    assert all(-(2**63) <= k < 2**63 for pair in together for k in pair)


@overlaps
def test_f9_same_seed_same_tokens_alone_and_batched(overlap: bool) -> None:
    params = SamplingParams(seed=1, max_tokens=10)
    alone = complete(make_engine(64), [1, 2, 3], params).token_ids
    engine = make_engine(64, overlap=overlap)
    requests = [engine.add_request([i], SamplingParams(max_tokens=7)) for i in range(5)]
    requests.append(engine.add_request([1, 2, 3], params))
    run_all(engine)
    assert engine.output(requests[-1]).token_ids == alone
    other = complete(make_engine(64), [1, 2, 3], SamplingParams(seed=2, max_tokens=10)).token_ids
    assert other != alone


@overlaps
def test_n_completions_are_independent(overlap: bool) -> None:
    engine = make_engine(64, overlap=overlap)
    output = complete(engine, [1, 2, 3], SamplingParams(n=3, max_tokens=6))
    assert [c.index for c in output.outputs] == [0, 1, 2]
    assert len({tuple(c.token_ids) for c in output.outputs}) == 3
    assert output.token_ids == output.outputs[0].token_ids and output["token_ids"] == output.token_ids


@overlaps
@pytest.mark.parametrize("stream", [False, True])
def test_stop_string_ends_the_request(overlap: bool, stream: bool) -> None:
    engine = text_engine("the cat sat on the mat", overlap=overlap)
    request = engine.add_request("go", greedy(40, stop=["sat on", "dog"]), stream=stream)
    run_all(engine)
    output = engine.output(request)
    assert (output.text, output.finish_reason, output.outputs[0].stop_reason) == ("the cat ", "stop", "sat on")
    tokenizer = byte_tokenizer()
    assert "sat on" in tokenizer.decode(output.token_ids) and "sat on" not in tokenizer.decode(output.token_ids[:-1])


@overlaps
@pytest.mark.parametrize("stop", [None, "never"])
@pytest.mark.parametrize("stream", [False, True])
def test_text_is_the_same_streamed_or_not(overlap: bool, stop: str | None, stream: bool) -> None:
    text = "naïve 日本語 👩"
    tokens = byte_tokenizer().encode(text)
    for limit, expected in ((len(tokens) + 1, text), (len(tokens) - 2, byte_tokenizer().decode(tokens[:-2]))):
        engine = text_engine(text, overlap=overlap)
        request = engine.add_request("go", greedy(limit, stop=stop), stream=stream)
        run_all(engine)
        assert engine.output(request).text == expected


@pytest.mark.parametrize("stream", [False, True])
def test_text_is_whole_when_the_pool_is_full(stream: bool) -> None:
    small = make_engine(2, scripted(*byte_tokenizer().encode("日本語")), tokenizer=byte_tokenizer(), vocab_size=300)
    request = small.add_request([5], greedy(40, ignore_eos=True), stream=stream)
    run_all(small)
    output = small.output(request)
    assert output.finish_reason == "length" and len(output.token_ids) == 8
    assert output.text == byte_tokenizer().decode(output.token_ids) == "日本�"


def test_stop_string_at_the_last_token_wins_over_length() -> None:
    engine = text_engine("the cat sat")
    limit = len(byte_tokenizer().encode("the cat sat"))
    output = complete(engine, "go", greedy(limit, stop="sat"))
    assert (output.text, output.finish_reason) == ("the cat ", "stop")


@overlaps
def test_logprobs_are_one_entry_a_token(overlap: bool) -> None:
    engine = make_engine(5, overlap=overlap)  # small: one of the two is preempted
    requests = [engine.add_request([i] * 7, greedy(8, logprobs=0)) for i in (1, 2)]
    run_all(engine)
    assert engine.scheduler.num_preemptions
    for request in requests:
        output = engine.output(request)
        assert [list(e) for e in output.logprobs] == [[t] for t in output.token_ids]
        assert [e[t].logprob for e, t in zip(output.logprobs, output.token_ids)] == [-float(i) for i in range(7, 15)]


@pytest.mark.parametrize(
    "prompt, error, text",
    [
        ([1, 300], ValueError, r"prompt: expected token ids in \[0, 300\), got 300"),
        ([-1], ValueError, r"prompt: expected token ids in \[0, 300\), got -1"),
        ([1.0], TypeError, "prompt: expected a string or a list of token ids"),
        ([True], TypeError, "prompt: expected a string or a list of token ids"),
        (None, TypeError, "prompt: expected a string or a list of token ids, got NoneType"),
        (b"x", TypeError, "prompt: expected a string or a list of token ids, got bytes"),
    ],
)
def test_prompt_of_another_kind_is_refused(prompt: object, error: type, text: str) -> None:
    engine = text_engine("x")
    with pytest.raises(error, match=text):
        engine.add_request(prompt, greedy(1))
    assert not engine.requests and not engine.has_work


def test_text_needs_a_tokenizer() -> None:
    engine = make_engine(8)
    with pytest.raises(ValueError, match="prompt: expected token ids, because the model has no tokenizer, got text"):
        engine.add_request("hello", greedy(1))
    with pytest.raises(ValueError, match=r"SamplingParams.stop: the model has no tokenizer, got 'x'"):
        engine.add_request([1], greedy(1, stop="x"))
    with pytest.raises(ValueError, match=r"SamplingParams.stop_token_ids: expected token ids in \[0, 1000\), got 1000"):
        engine.add_request([1], greedy(1, stop_token_ids=[1000]))
    with pytest.raises(ValueError, match=r"SamplingParams.logit_bias: expected token ids in \[0, 1000\), got 5000"):
        engine.add_request([1], greedy(1, logit_bias={5000: 1.0}))


def test_request_ids_are_unique_while_in_use() -> None:
    engine = make_engine(32)
    engine.add_request([1], greedy(2), "0")
    with pytest.raises(ValueError, match="request_id: expected one not in use, got '0'"):
        engine.add_request([1], greedy(2), "0")
    automatic = [engine.add_request([1], greedy(2)) for _ in range(3)]  # never collide with a chosen id
    assert len(engine.requests) == 4 and len({r.request_id for r in automatic}) == 3
    run_all(engine)
    engine.add_request([1], greedy(2), "0")
    run_all(engine)


@overlaps
def test_times_and_step_counts(overlap: bool) -> None:
    engine = make_engine(32, overlap=overlap, max_num_batched_tokens=4)
    request = engine.add_request(list(range(10)), greedy(3))
    assert engine.output(request).time_to_first_token is None and engine.output(request).latency is None
    results = []
    while engine.has_work:
        results.append(engine.step())
    output = engine.output(request)
    assert 0 <= output.time_to_first_token <= output.latency
    assert sum(r.num_prefill_tokens for r in results) == 10
    assert sum(r.num_decode_tokens for r in results) == 2
    assert [s for r in results for s in r.finished] == request.sequences
    assert sum(len(r.updated) for r in results) == 3


@overlaps
def test_abort_ends_all_completions(overlap: bool) -> None:
    engine = make_engine(64, overlap=overlap)
    request = engine.add_request([1, 2, 3], SamplingParams(n=3, max_tokens=50), "a")
    for _ in range(3):
        engine.step()
    engine.abort("a")
    run_all(engine)
    output = engine.output(request)
    assert output.finished and {c.finish_reason for c in output.outputs} == {"abort"}
    assert all(c.token_ids for c in output.outputs) and output.latency is not None


def test_text_beyond_the_vocabulary_is_refused() -> None:
    """A tokenizer may know more tokens than the model; their ids would read behind the embedding."""
    engine = make_engine(64, scripted(8), tokenizer=byte_tokenizer(), vocab_size=4)
    largest = max(byte_tokenizer().encode("z"))
    with pytest.raises(ValueError, match=rf"the tokenizer does not fit the model: expected .* \[0, 4\), got {largest}"):
        engine.add_request("z", greedy(1))
    assert not engine.has_work and not engine.requests


def test_eos_ids_beyond_the_vocabulary_are_left_out() -> None:
    assert make_engine(16, scripted(8), eos=(3, 10, -1, 2**40), vocab_size=10).eos_token_ids == {3}
    build = pytest.importorskip("nanovllm.engine.build", reason="needs torch and the model configs")
    for bad in ("x", 1.5, [True]):
        with pytest.raises(ValueError, match="eos_token_id: expected an integer or a list of them, got "):
            build.eos_token_ids(SimpleNamespace(eos_token_id=bad), None, None)


def test_what_is_no_token_id_is_named() -> None:
    engine = make_engine(16, scripted(8), vocab_size=10)
    for prompt, kind, i in (([1, 2.0], "float", 1), ([True], "bool", 0), ([1, [2]], "list", 1)):
        with pytest.raises(TypeError, match=rf"a list with {kind} at \[{i}\]"):
            engine.add_request(prompt, greedy(1))
