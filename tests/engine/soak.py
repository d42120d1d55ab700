"""An engine under random load: requests that come, share prefixes, are aborted and preempted, step by step.

    python -m tests.engine.soak --minutes 6 [--device cuda]

The load depends on the seed and the number of steps alone, so two runs of as many steps are comparable token by token.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import os
import random
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import torch

from nanovllm import LLM, SamplingParams
from tests.engine.fakes import check_idle, check_invariants
from tests.tiny import save_tiny

VOCAB = 199
MAX_MODEL_LEN = 256
OPTIONS = {"max_model_len": MAX_MODEL_LEN, "max_num_seqs": 24, "max_num_batched_tokens": 160, "num_kvcache_blocks": 60}
_CHECK_EVERY = 20  # steps


class Soak:
    """Random load on one engine; `counts` says what it was made of."""

    def __init__(self, llm: LLM, seed: int = 0) -> None:
        self.engine, self.rng = llm.engine, random.Random(seed)
        self.prefixes = [self._tokens(n) for n in (16, 40, 100)]
        self.tokens: dict[str, list[list[int]]] = {}  # of every finished request, by id
        self.counts: Counter[str] = Counter()

    def _tokens(self, count: int) -> list[int]:
        return [self.rng.randrange(3, VOCAB) for _ in range(count)]

    def _params(self) -> SamplingParams:
        rng = self.rng
        kind = rng.random()
        options: dict = {"max_tokens": rng.choice((1, 2, 5, 20, 60)), "temperature": 0.0, "ignore_eos": True}
        if kind < 0.4:
            options |= {
                "temperature": rng.choice((0.6, 1.0)),
                "seed": rng.randrange(100),
                "top_k": rng.choice((-1, 20)),
            }
        elif kind < 0.45:
            options |= {"repetition_penalty": 1.2, "frequency_penalty": 0.3}
        elif kind < 0.5:
            options |= {"logprobs": 2}
        elif kind < 0.55:
            options |= {"temperature": 1.0, "n": 2}
        elif kind < 0.65:
            options |= {"stop_token_ids": self._tokens(10)}
        return SamplingParams(**options)

    def _arrive(self) -> None:
        rng = self.rng
        prefix = rng.choice(self.prefixes) if rng.random() < 0.5 else []
        prompt = prefix + self._tokens(rng.choice((1, 3, 16, 33, 90)))
        self.counts["requests"] += 1
        self.engine.add_request(prompt, self._params(), f"{self.counts['requests']}")

    def step(self) -> None:
        """Arrivals, perhaps an abort, and one step of the engine."""
        rng, engine = self.rng, self.engine
        if len(engine.requests) < 60 and rng.random() < 0.5:
            for _ in range(rng.randrange(1, 5)):
                self._arrive()
        if engine.requests and rng.random() < 0.02:
            engine.abort(rng.choice(list(engine.requests)))
            self.counts["aborts"] += 1
        self._engine_step()

    def _engine_step(self) -> None:
        for seq in self.engine.step().finished:
            request = seq.data.request
            if request.is_finished:
                self.tokens[request.request_id] = [s.completion_token_ids for s in request.sequences]
        self.counts["steps"] += 1
        if self.counts["steps"] % _CHECK_EVERY == 0:
            check_invariants(self.engine)

    def run(self, goes_on: Callable[[Soak], bool]) -> None:
        """Steps while goes_on, then until nothing is left; then the engine must be as it was."""
        preemptions = self.engine.scheduler.num_preemptions
        while goes_on(self):
            self.step()
        while self.engine.has_work:
            self._engine_step()
        check_idle(self.engine)
        self.counts["preemptions"] += self.engine.scheduler.num_preemptions - preemptions

    def digest(self) -> str:
        """Of every token of every finished request."""
        return hashlib.sha256(repr(sorted(self.tokens.items())).encode()).hexdigest()


def memory(device: str) -> dict[str, int]:
    """Bytes in use by the process and by tensors on the GPU."""
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    used = {"host": pages * os.sysconf("SC_PAGE_SIZE")}
    if device == "cuda":
        torch.cuda.synchronize()
        used["gpu"] = torch.cuda.memory_allocated()
    return used


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=0, help="instead of minutes")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        dtype = "bfloat16" if args.device == "cuda" else "float32"
        path = str(save_tiny(Path(folder), "Qwen3ForCausalLM"))
        with LLM(path, device=args.device, dtype=dtype, overlap=True, **OPTIONS) as llm:
            Soak(llm, args.seed + 1).run(lambda s: s.counts["steps"] < 300)  # whatever is allocated once
            soak, before, end = Soak(llm, args.seed), memory(args.device), time.monotonic() + 60 * args.minutes
            soak.run(lambda s: s.counts["steps"] < args.steps or time.monotonic() < end)
            digest, counts = soak.digest(), dict(soak.counts)
            del soak
            after = memory(args.device)
    print(f"tokens {digest}")
    print(f"{counts}, memory {before} -> {after}", flush=True)
    assert counts["preemptions"] and counts["aborts"], "the load has grown too light"
    assert after.get("gpu", 0) <= before.get("gpu", 0), "tensors were left on the GPU"
    assert after["host"] <= before["host"] + 64 * 2**20, "the process has grown"


if __name__ == "__main__":
    main()
