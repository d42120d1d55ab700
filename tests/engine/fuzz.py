"""Differential fuzz of engine, scheduler and block manager against next(tokens).

One seed is one random engine (block size, pool, budget, limits, overlap, prefix caching) with random requests, aborts
and failing steps. The fake runner checks all K/V that a step can reach; the invariants are checked after every step;
in the end every request must have the tokens that it would get alone.

    python tests/engine/fuzz.py 20000          # seeds 0 .. 19999
    python tests/engine/fuzz.py 20000 40000    # seeds 20000 .. 39999
    NANOVLLM_FUZZ_SEEDS=5000 python -m pytest tests/engine/test_fuzz.py
"""

from __future__ import annotations

import random
import sys
import time
import traceback

from engine.fakes import by_hash, check_idle, check_invariants, expected_tokens, make_engine, random_tokens

from nanovllm.engine.llm_engine import LLMEngine, Request
from nanovllm.sampling_params import SamplingParams


class StepError(Exception):
    """What a failing step raises in this fuzz."""


class Case:
    """The engine and the requests of one seed."""

    def __init__(self, seed: int) -> None:
        self.rng = rng = random.Random(seed)
        self.block_size = rng.choice((1, 2, 3, 4, 8))
        self.num_blocks = rng.randint(4, 24)
        self.vocab = rng.choice((3, 8, 40))  # few tokens: many equal prefixes, and early stops
        self.max_model_len = rng.choice((6, 17, 40, 200))
        self.choose = by_hash(self.vocab)
        self.engine: LLMEngine = make_engine(
            self.num_blocks,
            self.choose,
            overlap=rng.random() < 0.5,
            eos=tuple(random_tokens(rng, rng.randint(0, 1 + self.vocab // 20), self.vocab)),
            vocab_size=self.vocab,
            kvcache_block_size=self.block_size,
            max_model_len=self.max_model_len,
            max_num_seqs=rng.choice((1, 2, 3, 4, 8)),
            max_num_batched_tokens=rng.choice((3, 5, 8, 16, 64)),
            enable_prefix_caching=rng.random() < 0.8,
        )
        self.engine.runner.keep = False
        self.shared = [random_tokens(rng, rng.randint(1, 4 * self.block_size), self.vocab) for _ in range(3)]
        self.abort_rate = rng.choice((0, 0, 0.05, 0.3))
        self.failure_rate = rng.choice((0, 0, 0, 0.03))
        self.requests: list[Request] = []
        self.aborted: set[str] = set()
        self.ended: dict[str, int] = {}  # seq_id of every sequence that step() reported as finished

    def prompt(self) -> list[int]:
        rng = self.rng
        start = rng.choice(self.shared)[: rng.randint(0, 40)] if rng.random() < 0.7 else []
        if self.requests and rng.random() < 0.2:  # the conversation goes on
            old = rng.choice(self.requests).sequences[0].token_ids
            start = old[: rng.randint(0, len(old))]
        return start + random_tokens(rng, rng.randint(0, 3 * self.block_size), self.vocab)

    def params(self) -> SamplingParams:
        rng = self.rng
        return SamplingParams(
            temperature=rng.choice((0, 1)),
            max_tokens=rng.choice((1, 2, 5, 20)),
            ignore_eos=rng.random() < 0.4,
            stop_token_ids=random_tokens(rng, 1, self.vocab) if rng.random() < 0.2 else None,
            seed=rng.choice((None, 1, 2)),
            n=rng.choice((1, 1, 1, 1, 2, 3)),
            logprobs=rng.choice((None, None, 0)),
            presence_penalty=rng.choice((0, 0, 0, 0.5)),
        )

    def add(self) -> None:
        prompt, params = self.prompt(), self.params()
        slots = self.num_blocks * self.block_size
        fits = 0 < len(prompt) < self.max_model_len and len(prompt) <= slots
        before = len(self.engine.scheduler.waiting), len(self.engine.requests)
        try:
            request = self.engine.add_request(prompt, params)
        except ValueError:
            assert not fits, f"a prompt of {len(prompt)} tokens was refused"
            assert before == (len(self.engine.scheduler.waiting), len(self.engine.requests))
            return
        assert fits, f"a prompt of {len(prompt)} tokens was accepted"
        self.requests.append(request)

    def abort(self) -> None:
        """Any request: waiting, running, in flight, finished, or one that never was."""
        request_id = self.rng.choice([*(r.request_id for r in self.requests), "unknown"])
        self.aborted |= {request_id} & set(self.engine.requests)
        self.engine.abort(request_id)

    def step(self) -> None:
        fail = self.rng.random() < self.failure_rate
        runner = self.engine.runner
        if fail:

            def raise_error(*_: object) -> None:
                raise StepError

            setattr(runner, self.rng.choice(("on_launch", "on_collect")), raise_error)
        open_requests = set(self.engine.requests)
        try:
            result = self.engine.step()
        except StepError:
            self.aborted |= open_requests
            check_idle(self.engine)
        else:
            for seq in result.finished:
                assert seq.seq_id not in self.ended, f"{seq} was reported as finished twice"
                self.ended[seq.seq_id] = 1
        runner.on_launch = runner.on_collect = None
        check_invariants(self.engine)

    def run(self) -> None:
        rng = self.rng
        arrivals = rng.randint(1, 14)
        patience = 0
        while arrivals or self.engine.has_work:
            while arrivals and rng.random() < 0.4:
                arrivals -= 1
                self.add()
                patience = 50 + 4 * sum(s.max_length for r in self.requests for s in r.sequences)
            if rng.random() < self.abort_rate:
                self.abort()
                check_invariants(self.engine)
            self.step()
            patience -= not arrivals
            assert patience >= 0 or arrivals, f"no end in sight: {self.engine.scheduler.running}"
        check_idle(self.engine)
        for request in self.requests:
            self.check_result(request)

    def check_result(self, request: Request) -> None:
        output = self.engine.output(request)
        assert output.finished
        for seq, completion in zip(request.sequences, output.outputs, strict=True):
            tokens, reason = expected_tokens(seq, self.choose, self.num_blocks * self.block_size)
            got = completion.token_ids
            if request.request_id in self.aborted and completion.finish_reason == "abort":
                is_whole = got == tokens and reason == "length"  # it only had to learn that the pool is full
                assert is_whole or got == tokens[: len(got)] != tokens, f"{seq}: {got}, alone {tokens}"
            else:
                assert (got, completion.finish_reason) == (tokens, reason), f"{seq}: {got}, alone {tokens} {reason}"
                assert seq.seq_id in self.ended or request.request_id in self.aborted, f"{seq}: end not reported"
            if request.params.logprobs is not None:
                assert [next(iter(e)) for e in completion.logprobs] == got, f"{seq}: logprobs of other tokens"


def main() -> None:
    bounds = [int(a) for a in sys.argv[1:]] or [2000]
    first, last = bounds if len(bounds) > 1 else (0, bounds[0])
    failures, start = 0, time.perf_counter()
    for seed in range(first, last):
        try:
            Case(seed).run()
        except Exception:
            failures += 1
            if failures <= 5:
                print(f"seed {seed}\n{traceback.format_exc(limit=-3)}")
    print(f"{last - first} seeds, {failures} failed, {time.perf_counter() - start:.0f} s")
    sys.exit(failures > 0)


if __name__ == "__main__":
    main()
