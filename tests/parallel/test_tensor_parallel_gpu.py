"""Engines of several GPUs: the tokens of one GPU, and failures that end in an error and leave a usable process."""

import os
import signal

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
    ties = NearTies.of_tiny("LlamaForCausalLM", "cuda", **FIELDS)
    free = torch.cuda.mem_get_info()[0]
    for size in SIZES:
        for options in ({}, {"enforce_eager": True, "check_agreement": True}):
            with make_llm(model, tensor_parallel_size=size, **options) as llm:
                ties.check(PROMPTS, llm.generate(PROMPTS, GREEDY, use_tqdm=False), f"{size} ranks {options}")
    assert torch.cuda.mem_get_info()[0] > free - (200 << 20), "memory is not returned"


@pytest.mark.parametrize("what", ["kill", "stop", "raise", "allocate"])
def test_a_rank_fails(model, monkeypatch, what):
    monkeypatch.setenv(VARIABLE, f"1:prefill:{what}")
    with make_llm(model, tensor_parallel_size=2, distributed_timeout=4) as llm:
        with pytest.raises(WorkerError, match="rank 1 ") as caught:
            tokens(llm)
        print(what, caught.value)


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
