"""The engine on CUDA in bf16: tokens follow transformers' own bf16 logits, whatever the engine's options."""

import pytest
import torch

from nanovllm import LLM, SamplingParams
from tests.engine.test_end_to_end import OPTIONS, PARAMS, PROMPTS, SAMPLED, behind_in_bf16
from tests.tiny import save_tiny, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
]
ARCHITECTURES = ["Qwen3ForCausalLM", "LlamaForCausalLM", "Qwen2ForCausalLM"]
GPU_OPTIONS = {name: options for name, options in OPTIONS.items() if options.get("kvcache_block_size", 16) >= 16} | {
    "eager": {"enforce_eager": True},
    "eager, no overlap": {"enforce_eager": True, "overlap": False},
    "graphs, no overlap": {"overlap": False},
    "few blocks: preemption": {"num_kvcache_blocks": 24, "kvcache_block_size": 16},
    "chunks": {"max_num_batched_tokens": 37},
    "odd batch": {"max_num_seqs": 7},
}


def make_llm(path, **options) -> LLM:
    defaults = {"device": "cuda", "dtype": "bfloat16", "max_model_len": 128, "gpu_memory_utilization": 0.3}
    return LLM(str(path), **(defaults | options))


def assert_follows(hf, prompts, outputs, what: str) -> None:
    """Every token is the most likely one of transformers' bf16 logits, or a near tie with it."""
    for i, (prompt, out) in enumerate(zip(prompts, outputs)):
        with torch.no_grad():
            logits = hf(torch.tensor([prompt + out.token_ids], device=hf.device)).logits[0, len(prompt) - 1 : -1]
        behind = behind_in_bf16(logits.float(), out.token_ids)
        assert behind <= 4, f"{what}: prompt {i} has a token {behind:.1f} last bits behind"


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_greedy_follows_transformers(tmp_path, architecture):
    size = {"hidden_size": 256} if architecture == "Qwen2ForCausalLM" else {}
    path = save_tiny(tmp_path, architecture, **size)
    hf = tiny_model(architecture, **size).bfloat16().cuda()
    for name, options in GPU_OPTIONS.items():
        with make_llm(path, **options) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            assert all(len(o.token_ids) == PARAMS.max_tokens for o in outputs)
            assert_follows(hf, PROMPTS, outputs, name)
            scheduler = llm.engine.scheduler
            while llm.engine.has_work:
                llm.engine.step()
            assert len(scheduler.block_manager.free_block_ids) == llm.engine.runner.num_kvcache_blocks
            if "preemption" in name:
                assert scheduler.num_preemptions > 0


@pytest.fixture(scope="module")
def qwen3(tmp_path_factory):
    return save_tiny(tmp_path_factory.mktemp("qwen3"), "Qwen3ForCausalLM")


def test_graph_replay_changes_only_the_live_slots(qwen3):
    """C4: a batch of 3 in a graph of 4 after a batch of 7: no other slot of the pool changes."""
    with make_llm(qwen3, num_kvcache_blocks=64, overlap=False) as llm:
        engine = llm.engine
        params = SamplingParams(temperature=0, max_tokens=40, ignore_eos=True)
        long = [engine.add_request([5 + i] * 20, params) for i in range(3)]
        short = [engine.add_request([5 + i] * 20, SamplingParams(temperature=0, max_tokens=3)) for i in range(4)]
        while not all(r.is_finished for r in short):
            engine.step()
        before = engine.runner.kv_cache.clone()
        lengths = [len(r.sequences[0]) for r in long]
        tables = [list(r.sequences[0].block_table) for r in long]
        assert engine.runner.graphs[0].buckets[:3] == [1, 2, 4]
        engine.step()
        changed = (engine.runner.kv_cache != before).any(dim=5).any(dim=4).any(dim=1).any(dim=0)  # [blocks, offset]
        slots = {tuple(s) for s in changed.nonzero().tolist()}
        assert slots <= {(t[(n - 1) // 16], (n - 1) % 16) for t, n in zip(tables, lengths)} and len(slots) == 3


def test_seeds_hold_in_any_batch(qwen3):
    params = [SAMPLED[i % len(SAMPLED)] for i in range(24)]
    with make_llm(qwen3) as llm:
        first = llm.generate(PROMPTS[:24], params, use_tqdm=False)
        again = llm.generate(PROMPTS[:24], params, use_tqdm=False)
    same = sum(a.token_ids == b.token_ids for a, b in zip(first, again))
    assert same >= 22, f"{same} of 24 repeat; the second run hits the prefix cache, near ties may differ"


def test_memory_comes_back(qwen3):
    """D9: three engines one after the other; the third finds the memory of the first."""
    free = []
    for _ in range(3):
        with make_llm(qwen3) as llm:
            llm.generate(PROMPTS[:4], PARAMS, use_tqdm=False)
        del llm
        torch.cuda.empty_cache()
        free.append(torch.cuda.mem_get_info()[0])
    assert free[2] >= free[0] - 200 * 2**20
