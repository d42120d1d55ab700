"""What the host costs: the Python side of a decode step, and the block manager in small and large pools.

    python benchmarks/scheduler.py [--seqs 256] [--steps 400] [--cpu-time] [--profile]

The scheduler, the engine and the model runner are the real ones; the model is a null forward with 8 logits a row. A
line a case, medians in microseconds. --cpu-time counts the thread's CPU time instead of wall time (for a machine that
others use); --profile prints where the time of a step goes.
"""

import argparse
import cProfile
import pstats
import time
from collections.abc import Callable
from statistics import median

import torch
from torch import Tensor, nn
from transformers import Qwen3Config

from nanovllm.config import EngineConfig
from nanovllm.engine.block_manager import BlockManager
from nanovllm.engine.llm_engine import LLMEngine
from nanovllm.engine.model_runner import ModelRunner
from nanovllm.engine.sequence import Sequence
from nanovllm.models.config import ModelConfig
from nanovllm.sampling_params import SamplingParams

BLOCK_SIZE = 16
PROMPT_LEN = 100  # tokens
VOCAB = 8
Phases = dict[str, list[float]]  # name of a phase to the seconds of each call
clock = time.perf_counter


class NullModel(nn.Module):
    """Computes nothing: zeros of the right shapes."""

    def __init__(self, num_tokens: int, num_seqs: int) -> None:
        super().__init__()
        self.hidden, self.logits = torch.zeros(num_tokens, 1), torch.zeros(num_seqs, VOCAB)

    def forward(self, input_ids: Tensor, positions: Tensor) -> Tensor:
        return self.hidden[: len(input_ids)]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.logits[: len(hidden)]


def make_engine(num_seqs: int, num_blocks: int) -> LLMEngine:
    hf_config = Qwen3Config(
        architectures=["Qwen3ForCausalLM"],
        num_hidden_layers=1,
        hidden_size=8,
        num_attention_heads=1,
        num_key_value_heads=1,
        head_dim=8,
        vocab_size=VOCAB,
        max_position_embeddings=4096,
    )
    config = EngineConfig(
        model="null",
        device="cpu",
        kvcache_block_size=BLOCK_SIZE,
        max_num_seqs=num_seqs,
        num_kvcache_blocks=num_blocks,
    )
    model = NullModel(config.max_num_batched_tokens, num_seqs)
    runner = ModelRunner(config, ModelConfig.from_hf(hf_config), model, torch.device("cpu"), torch.float32)
    return LLMEngine(config, runner, overlap=True)


def timed(phases: Phases, name: str, call: Callable) -> Callable:
    """call, with its seconds recorded."""
    seconds = phases.setdefault(name, [])

    def wrapper(*args: object) -> object:
        start = clock()
        result = call(*args)
        seconds.append(clock() - start)
        return result

    return wrapper


def run_steps(num_seqs: int, num_blocks: int, num_steps: int, profile: bool = False) -> Phases:
    """Seconds of every decode step of num_seqs sequences: the whole and its phases."""
    engine = make_engine(num_seqs, num_blocks)
    params = SamplingParams(temperature=0, max_tokens=num_steps + 20, ignore_eos=True)
    for i in range(num_seqs):
        engine.add_request([i % VOCAB] * PROMPT_LEN, params)
    while engine.scheduler.waiting:
        engine.step()
    for _ in range(10):
        engine.step()
    phases: Phases = {}
    scheduler, runner = engine.scheduler, engine.runner
    scheduler.schedule = timed(phases, "schedule", scheduler.schedule)
    runner.launch = timed(phases, "prepare + launch", runner.launch)
    runner.collect = timed(phases, "collect", runner.collect)
    scheduler.postprocess = timed(phases, "postprocess", scheduler.postprocess)
    step = timed(phases, "step", engine.step)
    profiler = cProfile.Profile()
    if profile:
        profiler.enable()
    for _ in range(num_steps):
        step()
    if profile:
        profiler.disable()
        pstats.Stats(profiler).sort_stats("tottime").print_stats(20)
    return phases


def run_prefills(num_prompts: int, prompt_len: int, num_steps: int) -> list[float]:
    """Seconds of steps that prefill num_prompts new prompts at once, their collection included."""
    engine = make_engine(num_prompts, num_prompts * (prompt_len // BLOCK_SIZE + 2))
    params = SamplingParams(temperature=0, max_tokens=1)
    phases: Phases = {}
    step = timed(phases, "step", lambda: (engine.step(), engine.step()))
    for i in range(num_steps):
        for j in range(num_prompts):
            engine.add_request([(i >> b) % 2 for b in range(9)] + [j % VOCAB, j // VOCAB] * (prompt_len // 2), params)
        step()
    return phases["step"]


def revive_and_free(num_blocks: int, num_cached: int) -> tuple[float, float]:
    """Seconds to give a prompt of num_cached cached, free blocks its table, and to free it again."""
    manager = BlockManager(num_blocks, BLOCK_SIZE)
    tokens = list(range(num_cached * BLOCK_SIZE + 1))
    seq = Sequence(tokens, BLOCK_SIZE)
    manager.allocate(seq, manager.can_allocate(seq))
    manager.hash_blocks(seq, 0, len(tokens))
    manager.deallocate(seq)
    revive, free = [], []
    for _ in range(20):
        seq = Sequence(tokens, BLOCK_SIZE)
        start = clock()
        hits = manager.can_allocate(seq)
        manager.allocate(seq, hits)
        middle = clock()
        manager.deallocate(seq)
        revive.append(middle - start)
        free.append(clock() - middle)
        assert hits == num_cached
    return median(revive), median(free)


def report(name: str, seconds: float) -> None:
    print(f"{name:<64} {seconds * 1e6:>10.1f} us")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seqs", type=int, default=256)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--profile", action="store_true")
    args = parser.parse_args()
    if args.cpu_time:
        global clock
        clock = time.thread_time
    torch.set_num_threads(1)  # the operators have nothing to compute here, and threads would only wait for each other
    needed = args.seqs * -(-(PROMPT_LEN + args.steps + 30) // BLOCK_SIZE)
    for num_blocks in (needed, 1_000_000):
        phases = run_steps(args.seqs, num_blocks, args.steps, args.profile)
        for name in ("schedule", "prepare + launch", "collect", "postprocess", "step"):
            report(f"{name}, {args.seqs} sequences, pool of {num_blocks:,} blocks", median(phases[name]))
    report("step that prefills 16 prompts of 1,009 tokens", median(run_prefills(16, 1000, 20)))
    for num_blocks in (2_000, 1_000_000):
        revive, free = revive_and_free(num_blocks, 1000)
        report(f"revive 1,000 cached blocks, pool of {num_blocks:,} blocks", revive)
        report(f"free 1,000 blocks, pool of {num_blocks:,} blocks", free)


if __name__ == "__main__":
    main()
