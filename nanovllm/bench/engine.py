"""Throughput and latency of a whole engine, on prompts of random token ids."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from nanovllm.sampling_params import SamplingParams

if TYPE_CHECKING:
    from nanovllm.llm import LLM

_MAX_TOKEN_ID = 10_000  # of synthetic prompts, as in nano-vLLM's bench.py, so that numbers compare
_TEMPERATURE = 0.6


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

        Raises:
            ValueError: num_requests or a range is not positive, or a range is empty; the text has the values.
        """
        if num_requests < 1:
            raise ValueError(f"num_requests: expected at least 1, got {num_requests}")
        for name, (low, high) in (("input_len", input_len), ("output_len", output_len)):
            if not 1 <= low <= high:
                raise ValueError(f"{name}: expected 1 <= MIN <= MAX, got {low} {high}")
        rng = random.Random(seed)
        top = min(vocab_size, _MAX_TOKEN_ID)
        prompts = [[rng.randrange(top) for _ in range(rng.randint(*input_len))] for _ in range(num_requests)]
        return cls(prompts, [rng.randint(*output_len) for _ in range(num_requests)])


@dataclass(slots=True, frozen=True)
class Throughput:
    """Token counts and wall time of one run over a workload."""

    requests: int
    prompt_tokens: int
    output_tokens: int
    seconds: float
    prompt_tokens_per_second: float
    output_tokens_per_second: float


@dataclass(slots=True, frozen=True)
class Latency:
    """Medians over the runs of one request on an idle engine."""

    runs: int
    prompt_tokens: int
    output_tokens: int
    time_to_first_token: float  # seconds
    output_tokens_per_second: float  # after the first token
    seconds: float


def throughput(llm: LLM, workload: Workload, show_progress: bool = False) -> Throughput:
    """Runs every request of the workload at once; the engine was warmed up by one short request before."""
    params = [SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=n) for n in workload.output_lens]
    llm.generate([[0]], SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=2), use_tqdm=False)
    start = time.perf_counter()
    outputs = llm.generate(workload.prompts, params, use_tqdm=show_progress)
    seconds = time.perf_counter() - start
    num_in = sum(map(len, workload.prompts))
    num_out = sum(len(o.token_ids) for o in outputs)  # fewer than asked for where a length limit ended one
    return Throughput(len(outputs), num_in, num_out, seconds, num_in / seconds, num_out / seconds)


def latency(llm: LLM, input_len: int, output_len: int, runs: int, seed: int) -> Latency:
    """One request at a time, each with another prompt, so that the prefix cache has nothing to give.

    Raises:
        ValueError: a length or the number of runs is too small.
    """
    if output_len < 2:
        raise ValueError(f"output_len: expected at least 2 (the first token is timed apart), got {output_len}")
    vocab_size = llm.engine.vocab_size or _MAX_TOKEN_ID
    work = Workload.random(runs + 1, (input_len, input_len), (output_len, output_len), vocab_size, seed)
    params = SamplingParams(temperature=_TEMPERATURE, ignore_eos=True, max_tokens=output_len)
    first, rate, total = [], [], []
    for prompt in work.prompts:
        output = llm.generate([prompt], params, use_tqdm=False)[0]
        assert output.time_to_first_token is not None and output.latency is not None
        first.append(output.time_to_first_token)
        rate.append((len(output.token_ids) - 1) / (output.latency - output.time_to_first_token))
        total.append(output.latency)
    medians = (statistics.median(x[1:]) for x in (first, rate, total))  # the first run was the warm-up
    return Latency(runs, input_len, len(output.token_ids), *medians)
