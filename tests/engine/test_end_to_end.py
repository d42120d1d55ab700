"""The whole engine on tiny random models: greedy tokens equal transformers', whatever the engine's options."""

import random
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from gguf import GGMLQuantizationType

from nanovllm import LLM, SamplingParams
from tests.engine.near_ties import NearTies
from tests.loader.gguf_files import write_model
from tests.tiny import save_tiny, tiny_model

pytestmark = pytest.mark.usefixtures("one_thread")

NUM_PROMPTS, VOCAB, MAX_TOKENS = 64, 199, 20


@dataclass(frozen=True)
class Model:
    architecture: str
    heads: int
    kv_heads: int
    head_dim: int
    tied: bool

    def overrides(self) -> dict:
        return {
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "hidden_size": self.head_dim * self.heads if self.architecture == "Qwen2ForCausalLM" else 96,
            "tie_word_embeddings": self.tied,
        }

    def __str__(self) -> str:
        tied = "tied" if self.tied else "untied"
        return f"{self.architecture[:-11]}-{self.heads}q{self.kv_heads}kv-d{self.head_dim}-{tied}"


MODELS = [
    Model("Qwen3ForCausalLM", 4, 2, 64, tied=True),
    Model("Qwen3ForCausalLM", 8, 1, 128, tied=False),
    Model("LlamaForCausalLM", 3, 3, 64, tied=False),
    Model("LlamaForCausalLM", 8, 2, 64, tied=True),
    Model("Qwen2ForCausalLM", 4, 2, 64, tied=False),
    Model("Qwen2ForCausalLM", 3, 1, 64, tied=True),
    Model("MistralForCausalLM", 4, 1, 128, tied=False),
]
# Each differs from the plain run in how the same tokens are scheduled, stored and shared.
OPTIONS = {
    "plain": {"kvcache_block_size": 16, "enable_prefix_caching": False},
    "block 1": {"kvcache_block_size": 1},
    "block 4": {"kvcache_block_size": 4},
    "block 256": {"kvcache_block_size": 256},
    "few blocks: preemption": {"kvcache_block_size": 4, "num_kvcache_blocks": 40},
    "few blocks, overlap": {"kvcache_block_size": 4, "num_kvcache_blocks": 40, "overlap": True},
    "small budget: chunks": {"kvcache_block_size": 4, "max_num_batched_tokens": 13},
    "small budget, no sharing": {"max_num_batched_tokens": 29, "enable_prefix_caching": False},
    "few at once": {"max_num_seqs": 3},
    "overlap": {"kvcache_block_size": 4, "overlap": True},
    "overlap, chunks": {"kvcache_block_size": 1, "max_num_batched_tokens": 17, "overlap": True},
}


def make_prompts() -> list[list[int]]:
    """Lengths 1 to 90, a third of them with one of three long common prefixes, some of them equal."""
    rng = random.Random(0)
    prefixes = [[rng.randrange(3, VOCAB) for _ in range(n)] for n in (8, 21, 48)]
    prompts = []
    for i in range(NUM_PROMPTS - 2):
        own = [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 5, 15, 16, 17, 40)))]
        prompts.append((rng.choice(prefixes) if i % 3 == 0 else []) + own)
    return [*prompts, prompts[0], prompts[3]]


PROMPTS = make_prompts()
PARAMS = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


@cache
def reference(model: Model) -> list[list[int]]:
    """Greedy tokens of transformers, one prompt at a time."""
    hf = tiny_model(model.architecture, **model.overrides())
    results = []
    for prompt in PROMPTS:
        options = {"do_sample": False, "min_new_tokens": MAX_TOKENS, "max_new_tokens": MAX_TOKENS, "eos_token_id": None}
        ids = torch.tensor([prompt])
        results.append(hf.generate(ids, attention_mask=torch.ones_like(ids), **options)[0, len(prompt) :].tolist())
    return results


@pytest.fixture(scope="module")
def checkpoint(request, tmp_path_factory):
    model = request.param
    return model, save_tiny(tmp_path_factory.mktemp("model"), model.architecture, **model.overrides())


def make_llm(path, **options) -> LLM:
    return LLM(str(path), **{"device": "cpu", "dtype": "float32", "max_model_len": 128} | options)


@pytest.mark.parametrize("checkpoint", MODELS, indirect=True, ids=str)
def test_greedy_equals_transformers(checkpoint):
    model, path = checkpoint
    expected = reference(model)
    assert len({tuple(e) for e in expected}) > NUM_PROMPTS // 2, "the random model should not repeat itself"
    for name, options in OPTIONS.items():
        with make_llm(path, **options) as llm:
            outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
            wrong = [i for i, (o, e) in enumerate(zip(outputs, expected)) if o.token_ids != e]
            assert not wrong, f"{name}: prompts {wrong[:5]} differ"
            scheduler = llm.engine.scheduler
            assert len(scheduler.block_manager.free_block_ids) == llm.engine.runner.num_kvcache_blocks
            if "preemption" in name or name == "few blocks, overlap":
                assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("overlap", [False, True])
def test_cold_and_cached_runs_agree(qwen3, overlap):
    """A16: the second run of a prompt hits its blocks and gives the same tokens."""
    with make_llm(qwen3, kvcache_block_size=4, overlap=overlap) as llm:
        cold = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        warm = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
        assert [o.token_ids for o in cold] == [o.token_ids for o in warm]
        assert [o.num_cached_tokens for o in warm] == [(len(p) - 1) // 4 * 4 for p in PROMPTS]


def test_prefill_never_reads_unwritten_slots(qwen3):
    """B5: the pool is NaN before the run, prompts are chunked and share prefixes; nothing of it reaches a token."""
    with make_llm(qwen3, kvcache_block_size=4, max_num_batched_tokens=11) as llm:
        llm.engine.runner.kv_cache.fill_(float("nan"))
        outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    with make_llm(qwen3) as llm:
        assert [o.token_ids for o in outputs] == [o.token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


SAMPLED = [
    SamplingParams(temperature=1.0, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0.7, top_k=20, seed=2, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.3, top_p=0.8, seed=3, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=1.0, min_p=0.05, seed=1, max_tokens=12, ignore_eos=True),
    SamplingParams(temperature=0, max_tokens=12, ignore_eos=True),
    SamplingParams(
        temperature=0.9, repetition_penalty=1.3, frequency_penalty=0.5, presence_penalty=0.4, seed=5, max_tokens=12
    ),
]


@pytest.mark.parametrize("overlap", [False, True])
def test_a_seed_gives_the_same_tokens_alone_and_in_any_batch(qwen3, overlap):
    """F9, and B6: also when the batch preempts."""
    params = [SAMPLED[i % len(SAMPLED)] for i in range(24)]
    prompts = PROMPTS[:24]
    with make_llm(qwen3) as llm:
        alone = [llm.generate([p], s, use_tqdm=False)[0].token_ids for p, s in zip(prompts, params)]
        together = llm.generate(prompts, params, use_tqdm=False)
        assert [o.token_ids for o in together] == alone
    with make_llm(
        qwen3, kvcache_block_size=4, num_kvcache_blocks=40, max_num_batched_tokens=20, overlap=overlap
    ) as llm:
        assert [o.token_ids for o in llm.generate(prompts, params, use_tqdm=False)] == alone
        assert llm.engine.scheduler.num_preemptions > 0


def test_seeds_and_completions_differ(qwen3):
    base = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    with make_llm(qwen3) as llm:
        runs = [llm.generate([PROMPTS[5]], SamplingParams(seed=s, **base), use_tqdm=False)[0] for s in (1, 2, 1)]
        assert runs[0].token_ids == runs[2].token_ids != runs[1].token_ids
        several = llm.generate([PROMPTS[5]], SamplingParams(seed=1, n=3, **base), use_tqdm=False)[0]
        tokens = [c.token_ids for c in several.outputs]
        assert tokens[0] == runs[0].token_ids and len({tuple(t) for t in tokens}) == 3
        unseeded = llm.generate([PROMPTS[5]] * 2, SamplingParams(**base), use_tqdm=False)
        assert unseeded[0].token_ids != unseeded[1].token_ids


@pytest.mark.parametrize("quant", ["Q4_0", "Q4_1", "Q8_0"])
def test_packed_weights_give_the_tokens_of_the_dense_ones(tmp_path, monkeypatch, quant):
    monkeypatch.setattr("nanovllm.loader.source.load_tokenizer", lambda _: None)  # the written file has none
    model = tiny_model("LlamaForCausalLM", tie_word_embeddings=True, intermediate_size=128)
    path = write_model(tmp_path / "x.gguf", model, GGMLQuantizationType[quant])
    with make_llm(path, enable_prefix_caching=False) as llm:
        packed = llm.generate(PROMPTS[:8], PARAMS, use_tqdm=False)
        layers = [m for m in llm.engine.runner.model.modules() if getattr(m, "packed", None)]
        assert len(layers) == 4 * model.config.num_hidden_layers + 1
        for layer in layers:
            layer.packed = None
        dense = llm.generate(PROMPTS[:8], PARAMS, use_tqdm=False)
    assert [o.token_ids for o in packed] == [o.token_ids for o in dense]
    assert len({tuple(o.token_ids) for o in dense}) > 4


def test_logprobs_equal_transformers(qwen3):
    prompt = PROMPTS[7]
    with make_llm(qwen3) as llm:
        out = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=5, logprobs=3), use_tqdm=False)[0]
    hf = tiny_model("Qwen3ForCausalLM")
    with torch.no_grad():
        expected = hf(torch.tensor([prompt + out.token_ids])).logits[0].log_softmax(-1)
    assert out.logprobs is not None and len(out.logprobs) == len(out.token_ids)
    for i, entry in enumerate(out.logprobs):
        row = expected[len(prompt) - 1 + i]
        values, ids = row.topk(3)
        assert next(iter(entry)) == out.token_ids[i] and set(entry) == set(ids.tolist())
        for rank, (token_id, value) in enumerate(zip(ids.tolist(), values.tolist()), 1):
            assert entry[token_id].logprob == pytest.approx(value, abs=1e-4) and entry[token_id].rank == rank


def test_bias_and_min_tokens(qwen3):
    base = {"temperature": 0, "max_tokens": 6}
    with make_llm(qwen3) as llm:
        forced = llm.generate([PROMPTS[0]], SamplingParams(logit_bias={17: 1e4}, **base), use_tqdm=False)[0]
        assert forced.token_ids == [17] * 6
        stop = SamplingParams(logit_bias={17: 1e4}, stop_token_ids=[17], **base)
        out = llm.generate([PROMPTS[0]], stop, use_tqdm=False)[0]
        assert (out.token_ids, out.finish_reason, out.outputs[0].stop_reason) == ([17], "stop", 17)
        late = SamplingParams(logit_bias={17: 1e4}, stop_token_ids=[17], min_tokens=3, **base)
        out = llm.generate([PROMPTS[0]], late, use_tqdm=False)[0]
        assert len(out.token_ids) == 4 and out.token_ids[-1] == 17 and 17 not in out.token_ids[:3]


def test_limits_of_length(qwen3):
    """B1, B17: a full pool and max_model_len end a request with "length"; prompts that can never fit are refused."""
    with make_llm(qwen3, max_model_len=16) as llm:
        out = llm.generate([PROMPTS[0][:10]], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)[0]
        assert (len(out.token_ids), out.finish_reason) == (6, "length")
        with pytest.raises(ValueError, match=r"prompts\[1\]: prompt of 16 tokens.*max_model_len = 16"):
            llm.generate([[5], [5] * 16], PARAMS, use_tqdm=False)
    with make_llm(qwen3, kvcache_block_size=4, num_kvcache_blocks=2) as llm:
        out = llm.generate([[5] * 6], SamplingParams(max_tokens=20, ignore_eos=True), use_tqdm=False)[0]
        assert (len(out.token_ids), out.finish_reason) == (3, "length")
        with pytest.raises(ValueError, match="needs 3 KV-cache blocks of 4 tokens, the pool has 2"):
            llm.generate([[5] * 12], PARAMS, use_tqdm=False)
        assert len(llm.generate([[5] * 3], PARAMS, use_tqdm=False)) == 1


def test_bfloat16_is_as_near_as_transformers_own(qwen3):
    """In bf16 a token may differ from fp32's only within the rounding errors that transformers' own bf16 run has."""
    ties = NearTies.of_tiny("Qwen3ForCausalLM")
    with make_llm(qwen3, dtype="bfloat16") as llm:
        ties.check(PROMPTS[:24], llm.generate(PROMPTS[:24], PARAMS, use_tqdm=False), "bfloat16")
