"""Engines of two and four real ranks on the CPU: exactly the tokens of one rank, in fp32."""

import random
from functools import cache

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.parallel.group import Group
from tests.tiny import save_tiny

VOCAB, MAX_TOKENS = 199, 16  # a prime: no number of ranks divides it
# (architecture, query heads, KV heads): KV heads are shared out, or copied where there are more ranks than KV heads
MODELS = [
    ("Qwen3ForCausalLM", 4, 2, {"tie_word_embeddings": True}),
    ("LlamaForCausalLM", 8, 1, {"attention_bias": True, "mlp_bias": True}),
    ("Qwen2ForCausalLM", 4, 4, {"hidden_size": 128, "head_dim": 32}),
    ("LlamaForCausalLM", 9, 3, {"hidden_size": 144, "tie_word_embeddings": True}),  # the heads of SmolLM2-135M
]
# Chunks, preemption, shared blocks and a step in flight, all at once.
CRAMPED = {"kvcache_block_size": 4, "num_kvcache_blocks": 40, "max_num_batched_tokens": 17, "overlap": True}


def make_prompts() -> list[list[int]]:
    rng = random.Random(0)
    prefix = [rng.randrange(3, VOCAB) for _ in range(21)]
    return [
        (prefix if i % 3 == 0 else []) + [rng.randrange(3, VOCAB) for _ in range(rng.choice((1, 2, 5, 17, 40)))]
        for i in range(20)
    ]


PROMPTS = make_prompts()
GREEDY = SamplingParams(temperature=0, max_tokens=MAX_TOKENS, ignore_eos=True)


def make_llm(path, **options) -> LLM:
    return LLM(str(path), **{"device": "cpu", "dtype": "float32", "max_model_len": 128, "seed": 3} | options)


def mixed_params() -> list[SamplingParams]:
    """Of each kind some: greedy, sampled, penalised, with logprobs."""
    kinds = [
        GREEDY,
        SamplingParams(temperature=0.8, top_p=0.9, max_tokens=MAX_TOKENS, ignore_eos=True),
        SamplingParams(temperature=0, repetition_penalty=1.3, presence_penalty=0.5, max_tokens=9, ignore_eos=True),
        SamplingParams(temperature=0, logprobs=2, max_tokens=7, ignore_eos=True),
    ]
    return [kinds[i % len(kinds)] for i in range(len(PROMPTS))]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory):
    @cache
    def make(index: int):
        architecture, heads, kv_heads, fields = MODELS[index]
        path = tmp_path_factory.mktemp("model")
        fields = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "num_hidden_layers": 2} | fields
        save_tiny(path, architecture, vocab_size=VOCAB, max_shard_size="100KB", **fields)
        with make_llm(path) as llm:
            greedy = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
            mixed = llm.generate(PROMPTS, mixed_params(), use_tqdm=False)
        return path, greedy, mixed

    return make


def tokens(outputs) -> list[list[int]]:
    return [o.token_ids for o in outputs]


@pytest.mark.parametrize(
    ("index", "size", "options"),
    [
        (0, 2, CRAMPED | {"check_agreement": True}),
        (0, 4, {}),
        (1, 2, {}),
        (1, 4, CRAMPED),
        (2, 4, CRAMPED),
        (3, 2, CRAMPED),  # 3 KV heads on 2 ranks: padded to 4
    ],
    ids=lambda v: str(v) if isinstance(v, int) else "cramped" if v else "roomy",
)
def test_tokens_of_one_rank(checkpoints, index, size, options):
    path, greedy, mixed = checkpoints(index)
    with make_llm(path, tensor_parallel_size=size, **options) as llm:
        stream = llm.stream(PROMPTS[0], GREEDY)
        next(stream)
        stream.close()  # aborted in the middle
        assert tokens(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == tokens(greedy)
        if not options:  # request numbers, and with them the seeds, are those of the plain run but for the stream
            return
        assert llm.engine.scheduler.num_preemptions > 0
        outputs = llm.generate(PROMPTS, mixed_params(), use_tqdm=False)
        for i, (o, e, p) in enumerate(zip(outputs, mixed, mixed_params())):
            if p.temperature == 0:
                assert o.token_ids == e.token_ids, i
            if p.logprobs:
                assert [sorted(x) for x in o.logprobs] == [sorted(x) for x in e.logprobs], i


def test_seeded_sampling_does_not_depend_on_the_ranks(checkpoints):
    path, _, _ = checkpoints(0)
    params = SamplingParams(temperature=1.0, top_k=50, seed=5, max_tokens=MAX_TOKENS, ignore_eos=True, n=2)
    with make_llm(path) as llm:
        expected = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS[:6], params, use_tqdm=False)]
    with make_llm(path, tensor_parallel_size=2) as llm:
        assert llm.engine.runner.runner.kv_cache.shape[4] == 1  # KV heads of a rank
        got = [[c.token_ids for c in o.outputs] for o in llm.generate(PROMPTS[:6], params, use_tqdm=False)]
    assert got == expected


def test_impossible_sizes_are_refused_before_anything_starts(checkpoints, monkeypatch):
    monkeypatch.setattr("subprocess.Popen", None)
    path, _, _ = checkpoints(3)
    with pytest.raises(ValueError, match="4 ranks cannot share 9 attention heads with 3 key-value heads"):
        make_llm(path, tensor_parallel_size=4)


def test_dummy_weights_are_those_of_one_rank(checkpoints):
    path, _, _ = checkpoints(0)
    prompts, params = PROMPTS[:4], SamplingParams(temperature=0, max_tokens=4, ignore_eos=True)
    with make_llm(path, load_format="dummy") as llm:
        expected = tokens(llm.generate(prompts, params, use_tqdm=False))
    with make_llm(path, load_format="dummy", tensor_parallel_size=2) as llm:
        assert tokens(llm.generate(prompts, params, use_tqdm=False)) == expected


def test_the_pool_is_the_smallest_of_all_ranks(checkpoints):
    """What rank 0 would give itself is more than another rank has: ids beyond must not exist."""

    class Poorer(Group):
        def min(self, value: int) -> int:
            return min(value, 5)

    path, _, _ = checkpoints(0)
    with make_llm(path) as llm:
        runner = llm.engine.runner
        poor = type(runner)(llm.config, runner.model_config, runner.model, runner.device, runner.dtype, Poorer())
        assert poor.num_kvcache_blocks == poor.kv_cache.shape[2] == 5 < runner.num_kvcache_blocks
