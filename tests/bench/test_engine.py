"""Workloads and measurements: counts and orders, never times."""

import random

import pytest

from nanovllm import LLM
from nanovllm.bench.engine import Workload, latency, prefill, throughput
from tests.bench.small import small_llm  # noqa: F401


def test_workload_is_in_range_and_repeatable() -> None:
    work = Workload.random(50, (3, 7), (2, 4), vocab_size=30, seed=1)
    assert {len(p) for p in work.prompts} == {3, 4, 5, 6, 7}
    assert set(work.output_lens) == {2, 3, 4}
    assert {t for p in work.prompts for t in p} == set(range(30))
    assert work == Workload.random(50, (3, 7), (2, 4), vocab_size=30, seed=1)
    assert work != Workload.random(50, (3, 7), (2, 4), vocab_size=30, seed=2)


def test_the_default_workload_is_that_of_nano_vllm() -> None:
    """Its bench.py draws with randint after seed(0), prompts before output lengths; its output tokens are known."""
    rng = random.Random(0)
    prompts = [[rng.randint(0, 10000) for _ in range(rng.randint(100, 1024))] for _ in range(256)]
    work = Workload.random(256, (100, 1024), (100, 1024), vocab_size=151936, seed=0)
    assert work.prompts == prompts
    assert sum(work.output_lens) == 133_966


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, (1, 2), (1, 2)), "num_requests: expected at least 1, got 0"),
        ((1, (0, 2), (1, 2)), "input_len: expected 1 <= MIN <= MAX, got 0 2"),
        ((1, (1, 2), (5, 4)), "output_len: expected 1 <= MIN <= MAX, got 5 4"),
    ],
)
def test_workload_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.random(*arguments, vocab_size=10, seed=0)


def test_throughput(small_llm: LLM) -> None:  # noqa: F811
    work = Workload.random(5, (3, 40), (2, 9), vocab_size=300, seed=0)
    result = throughput(small_llm, work, temperature=0.0)
    num_in, num_out = sum(map(len, work.prompts)), sum(work.output_lens)
    assert (result.requests, result.prompt_tokens, result.output_tokens) == (5, num_in, num_out)
    assert result.output_tokens_per_second == pytest.approx(num_out / result.seconds)
    assert sum(s.num_sampled for s in result.steps) == num_out
    assert sum(end - start for s in result.steps for start, end in s.chunks) == num_in


def test_latency(small_llm: LLM) -> None:  # noqa: F811
    result = latency(small_llm, 3, 10, 6, runs=2)
    assert (result.requests, result.input_len, result.output_len) == (3, 10, 6)
    assert 0 < result.time_to_first_token < result.seconds and 0 < result.time_per_output_token < result.seconds
    assert result.output_tokens_per_second == pytest.approx(18 / result.seconds)
    assert [len(s.decode_ends) for s in result.steps] == [0, 3, 3, 3, 3, 3]
    assert result.steps[0].chunks == [(0, 10)] * 3, "nothing comes from the prefix cache"


def test_prefill(small_llm: LLM) -> None:  # noqa: F811
    cold, hit = prefill(small_llm, 100, runs=2), prefill(small_llm, 100, 0.9, runs=2)
    assert (cold.prompt_tokens, cold.cached_tokens, cold.steps[0].chunks) == (100, 0, [(0, 100)])
    assert (hit.prompt_tokens, hit.cached_tokens, hit.steps[0].chunks) == (100, 80, [(80, 100)])  # 5 blocks of 16
    assert hit.prompt_tokens_per_second == pytest.approx(20 / hit.time_to_first_token)


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda llm: latency(llm, 1, 4, 1), "output_len: expected at least 2 .* got 1"),
        (lambda llm: latency(llm, 1, 4, 4, runs=0), "runs: expected at least 1, got 0"),
        (lambda llm: latency(llm, 0, 4, 4), "num_requests: expected at least 1, got 0"),
        (lambda llm: prefill(llm, 0), "input_len: expected at least 1, got 0"),
        (lambda llm: prefill(llm, 8, 1.0), r"prefix_hit: expected a share in \[0, 1\), got 1.0"),
        (lambda llm: prefill(llm, 300), r"prompts\[0\]: prompt of 300 tokens"),
    ],
)
def test_errors(small_llm: LLM, call, message: str) -> None:  # noqa: F811
    with pytest.raises(ValueError, match=message):
        call(small_llm)
    assert small_llm.engine.observer is None
