"""Throughput, latency and time to first token of a whole engine, on prompts of random token ids."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from nanovllm.bench.step_times import Step, record_steps
from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM
    from nanovllm.outputs import RequestOutput

MAX_TOKEN_ID = 10_000  # of synthetic prompts, as in nano-vLLM's bench.py, so that numbers compare
TEMPERATURE = 0.6
PREFILL_LENGTHS = (128, 8192, 32768)


@dataclass(slots=True, frozen=True)
class Workload:
    """Prompts [num_requests] of token ids, and the output tokens that each of them gets."""

    prompts: list[list[int]]
    output_lens: list[int]

    @classmethod
    def random(
        cls, num_requests: int, input_len: tuple[int, int], output_len: tuple[int, int], vocab_size: int, seed: int
    ) -> Workload:
        """Lengths are uniform in the closed ranges, token ids in the vocabulary; the seed decides both.

        256 requests of 100 to 1024 tokens in and out with seed 0 are those of nano-vLLM's bench.py, token for token.

        Raises:
            ValueError: num_requests or a range is not positive, or a range is empty; the text has the values.
        """
        if num_requests < 1:
            raise ValueError(f"num_requests: expected at least 1, got {num_requests}")
        for name, (low, high) in (("input_len", input_len), ("output_len", output_len)):
            if not 1 <= low <= high:
                raise ValueError(f"{name}: expected 1 <= MIN <= MAX, got {low} {high}")
        rng = random.Random(seed)
        top = min(vocab_size - 1, MAX_TOKEN_ID)
        prompts = [[rng.randint(0, top) for _ in range(rng.randint(*input_len))] for _ in range(num_requests)]
        return cls(prompts, [rng.randint(*output_len) for _ in range(num_requests)])


@dataclass(slots=True)
class Throughput:
    """Token counts and wall time of one run over a workload."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float
    steps: list[Step] = field(repr=False)


@dataclass(slots=True)
class Latency:
    """`requests` at once on an idle engine: the run with the median wall time."""

    requests: int
    input_len: int
    output_len: int
    time_to_first_token: float  # seconds, mean over the requests
    time_per_output_token: float  # seconds, after the first token, mean over the requests
    seconds: float
    output_tokens_per_second: float  # over all of it, prefill included
    steps: list[Step] = field(repr=False)


@dataclass(slots=True)
class Prefill:
    """One request of one output token on an idle engine: the run with the median time."""

    prompt_tokens: int
    cached_tokens: int
    time_to_first_token: float  # seconds
    prompt_tokens_per_second: float  # of those that were not cached
    steps: list[Step] = field(repr=False)

    @property
    def seconds(self) -> float:
        return self.time_to_first_token


Result = Throughput | Latency | Prefill


def _generate(
    llm: LLM, work: Workload, temperature: float, profile: bool, show_progress: bool = False
) -> tuple[list[RequestOutput], float, list[Step]]:
    """Outputs, wall time of generate() and steps; nothing is detokenised."""
    params = [SamplingParams(temperature=temperature, ignore_eos=True, max_tokens=n) for n in work.output_lens]
    tokenizer, llm.engine.tokenizer = llm.engine.tokenizer, None
    try:
        with record_steps(llm.engine, profile) as steps:
            start = time.perf_counter()
            outputs = llm.generate(work.prompts, params, use_tqdm=show_progress)
            seconds = time.perf_counter() - start
    finally:
        llm.engine.tokenizer = tokenizer
    return outputs, seconds, steps


def throughput(
    llm: LLM, work: Workload, temperature: float = TEMPERATURE, profile: bool = False, show_progress: bool = False
) -> Throughput:
    """Runs every request of the workload at once, after one short warm-up."""
    _generate(llm, Workload([[0]], [2]), temperature, profile=False)
    outputs, seconds, steps = _generate(llm, work, temperature, profile, show_progress)
    num_in = sum(map(len, work.prompts))
    num_out = sum(len(o.token_ids) for o in outputs)  # fewer than asked for where a length limit ended one
    return Throughput(len(outputs), num_in, num_out, seconds, num_in / seconds, num_out / seconds, steps)


def latency(
    llm: LLM,
    num_requests: int,
    input_len: int,
    output_len: int,
    runs: int = 3,
    seed: int = 0,
    temperature: float = TEMPERATURE,
    profile: bool = False,
) -> Latency:
    """`runs` times the same number of requests, after one warm-up, always with other prompts, so that the prefix cache
    has nothing to give.

    Raises:
        ValueError: a length or a number is too small.
    """
    _at_least("runs", runs, 1)
    if output_len < 2:
        raise ValueError(f"output_len: expected at least 2 (the first token is timed apart), got {output_len}")
    results = []
    for run in range(runs + 1):
        lengths = (input_len, input_len), (output_len, output_len)
        work = Workload.random(num_requests, *lengths, _vocab_size(llm), seed + run)
        outputs, seconds, steps = _generate(llm, work, temperature, profile)
        first = statistics.mean(o.time_to_first_token or 0.0 for o in outputs)
        total = statistics.mean(o.latency or 0.0 for o in outputs)
        num_out = sum(len(o.token_ids) for o in outputs)
        per_token = (total - first) / max(1, num_out / num_requests - 1)
        num_out_each = len(outputs[0].token_ids)
        rate = num_out / seconds
        results.append(Latency(num_requests, input_len, num_out_each, first, per_token, seconds, rate, steps))
    return _median(results[1:])


def prefill(
    llm: LLM, input_len: int, cached_share: float = 0.0, runs: int = 5, seed: int = 0, profile: bool = False
) -> Prefill:
    """Time to the first token of one prompt, with the first `cached_share` of it in the prefix cache.

    Raises:
        ValueError: a length or the number of runs is too small, the share is not in [0, 1), or the engine has no prefix
            cache for it.
    """
    _at_least("input_len", input_len, 1)
    _at_least("runs", runs, 1)
    if not 0 <= cached_share < 1:
        raise ValueError(f"prefix_hit: expected a share in [0, 1), got {cached_share}")
    if cached_share and not llm.engine.config.enable_prefix_caching:
        raise ValueError(f"prefix_hit: expected 0 without prefix caching, got {cached_share}")
    rng = random.Random(f"{seed} {input_len} {cached_share}")
    top = min(_vocab_size(llm) - 1, MAX_TOKEN_ID)
    shared = [rng.randint(0, top) for _ in range(int(input_len * cached_share))]
    results = []
    for _ in range(runs + 1):
        own = [rng.randint(0, top) for _ in range(input_len - len(shared))]
        outputs, _, steps = _generate(llm, Workload([shared + own], [1]), 0.0, profile)
        seconds, cached = outputs[0].time_to_first_token or 0.0, outputs[0].num_cached_tokens
        results.append(Prefill(input_len, cached, seconds, (input_len - cached) / seconds, steps))
    return _median(results[1:])


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ValueError(f"{name}: expected at least {least}, got {value}")


def _vocab_size(llm: LLM) -> int:
    return llm.engine.vocab_size or MAX_TOKEN_ID


def _median(results: list) -> Latency | Prefill:
    """The result with the median wall time (of an even number, the faster of the two)."""
    return sorted(results, key=lambda r: r.seconds)[(len(results) - 1) // 2]
