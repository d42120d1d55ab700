"""Engines of several GPUs: the tokens of one GPU, and failures that end in an error and leave a usable process."""

import os
import signal
import time

import pytest
import torch

from nanovllm import LLM, SamplingParams
from nanovllm.parallel.faults import VARIABLE
from nanovllm.parallel.progress import WorkerError
from tests.engine.near_ties import NearTies
from tests.tiny import save_tiny

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]
SIZES = [n for n in (2, 3) if n <= torch.cuda.device_count()]  # SmolLM2 has 9 heads, 3 KV heads
PROMPTS = [list(range(3, 3 + n)) for n in (1, 9, 30, 100, 5, 7)]
GREEDY = SamplingParams(temperature=0, max_tokens=32, ignore_eos=True)
# The heads of SmolLM2-135M: 2 ranks pad its 3 KV heads to 4.
HEADS = {"num_attention_heads": 9, "num_key_value_heads": 3, "hidden_size": 576, "intermediate_size": 1536}
FIELDS = HEADS | {"vocab_size": 4099, "tie_word_embeddings": True, "num_hidden_layers": 4}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("model"), "LlamaForCausalLM", **FIELDS)


def make_llm(model, **options) -> LLM:
    fixed = {"max_model_len": 256, "max_num_seqs": 8, "max_num_batched_tokens": 64, "num_kvcache_blocks": 256}
    return LLM(str(model), device="cuda", dtype="bfloat16", **fixed | options)


def tokens(llm: LLM) -> list[list[int]]:
    return [o.token_ids for o in llm.generate(PROMPTS, GREEDY, use_tqdm=False)]


def test_tokens(model):
    """Graphs, and eager steps with the GPUs in another order; and all memory comes back."""
    ties = NearTies.of_tiny("LlamaForCausalLM", "cuda:0", **FIELDS)
    free = []
    for size in SIZES:
        for first, options in ((0, {}), (1, {"enforce_eager": True, "check_agreement": True}), (0, {})):
            with torch.cuda.device(first), make_llm(model, tensor_parallel_size=size, **options) as llm:
                ties.check(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), f"{size} ranks {options}")
            torch.cuda.empty_cache()
            free.append([torch.cuda.mem_get_info(i)[0] for i in (0, 1)])
    print(free)  # from the second on this process has a context on both
    assert all(after > before - (200 << 20) for before, after in zip(free[1], free[-1])), "memory is not returned"


@pytest.mark.parametrize(
    ("when", "what", "cause"),
    [
        ("prefill", "kill", "died of signal 9"),
        ("decode", "stop", "gives no sign of life .*its process is stopped"),
        ("decode", "raise", "raised ValueError: fault injected"),
        ("prefill", "allocate", "raised OutOfMemoryError: CUDA out of memory"),
    ],
)
def test_a_rank_fails(model, monkeypatch, when, what, cause):
    monkeypatch.setenv(VARIABLE, f"1:{when}:{what}")
    options = {"stop": {"distributed_timeout": 6}, "raise": {"enforce_eager": True}}.get(what, {})
    with make_llm(model, tensor_parallel_size=2, **options) as llm:
        start = time.monotonic()
        with pytest.raises(WorkerError, match=f"rank 1 {cause}") as caught:
            tokens(llm)
        print(f"{when} {what}: {time.monotonic() - start:.2f} s: {caught.value}")


def test_a_rank_is_killed_while_graphs_run(model):
    with make_llm(model, tensor_parallel_size=2) as llm:
        before = tokens(llm)
        (worker,) = [p.pid for p in llm.engine.runner._team.watcher._processes.values()]
        os.kill(worker, signal.SIGKILL)
        with pytest.raises(WorkerError, match="rank 1 died of signal 9") as caught:
            for _ in range(100):
                tokens(llm)
        print(caught.value)
    with make_llm(model, tensor_parallel_size=2) as llm:
        assert tokens(llm) == before
