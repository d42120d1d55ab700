"""Steps from graphs: every batch has one that fits (C1, C2), and their tokens are those of the eager steps."""

from bisect import bisect_left
from dataclasses import replace

import pytest

from nanovllm import LLM, SamplingParams
from nanovllm.engine import step_graphs
from nanovllm.engine.step_graphs import batch_buckets, longest_graph, mixed_buckets, smallest_mixed_bucket
from tests.engine.cpu_graphs import use_graphs
from tests.engine.test_end_to_end import PARAMS, PROMPTS, SAMPLED, make_llm

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 9, 12, 16, 17, 20, 100, 200, 256, 257, 512, 1000])
def test_every_batch_has_a_bucket(max_rows):
    """C2: also where max_num_seqs is no multiple of anything."""
    buckets = batch_buckets(max_rows)
    assert buckets == sorted(set(buckets)) and buckets[-1] == max_rows and buckets[0] == 1
    for size in range(1, max_rows + 1):
        bucket = buckets[bisect_left(buckets, size)]
        assert size <= bucket <= max(2 * size, size + 128)


@pytest.mark.parametrize("max_tokens, max_rows", [(4096, 256), (512, 3), (300, 300), (20, 7), (1, 1)])
def test_every_short_step_has_a_bucket(max_tokens, max_rows):
    buckets = mixed_buckets(max_tokens, max_rows)
    assert buckets == sorted(set(buckets))
    for tokens in range(1, max_tokens + 1):
        for decodes in {0, 1, min(tokens - 1, max_rows - 1, 256)} & set(range(min(tokens, max_rows))):
            for chunks in {1, min(tokens - decodes, max_rows - decodes, 32)}:
                bucket = smallest_mixed_bucket(buckets, tokens, decodes, chunks)
                assert bucket.tokens >= tokens and bucket.decodes >= decodes and bucket.chunks >= chunks
                assert bucket.tokens <= max(16, 2 * tokens)
                assert (bucket.decodes > 0) == (decodes > 0), "decode attention only where something decodes"


def test_steps_too_large_for_every_graph():
    """C1: the caller then runs them eagerly."""
    buckets = mixed_buckets(512, 512)
    assert smallest_mixed_bucket(buckets, 513, 0, 1) is None
    assert smallest_mixed_bucket(buckets, 400, 257, 1) is None
    assert smallest_mixed_bucket(buckets, 400, 0, 33) is None


def test_large_models_have_graphs_of_short_steps_only():
    assert longest_graph(600_000_000) == 4096 and longest_graph(32_000_000_000) == 512
    assert 1024 < longest_graph(1_700_000_000) < 2048


@pytest.fixture(scope="module")
def expected(qwen3):
    with make_llm(qwen3) as llm:
        return [o.token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


def tokens_of(llm: LLM, prompts, params) -> list[list[int]]:
    tokens = [o.token_ids for o in llm.generate(prompts, params, use_tqdm=False)]
    while llm.engine.has_work:
        llm.engine.step()
    assert len(llm.engine.scheduler.block_manager.free_block_ids) == llm.engine.runner.num_kvcache_blocks
    return tokens


@pytest.mark.parametrize(
    "options",
    [
        {"max_num_batched_tokens": 400},
        {"max_num_batched_tokens": 200, "overlap": True},
        {"max_num_batched_tokens": 29, "overlap": True},
        {"max_num_seqs": 3, "overlap": True},
        {"max_num_seqs": 19, "max_num_batched_tokens": 150},
        {"num_kvcache_blocks": 40, "kvcache_block_size": 4, "overlap": True},
        {"max_num_batched_tokens": 520, "enable_prefix_caching": False, "overlap": True},
    ],
    ids=str,
)
def test_graphs_give_the_tokens_of_eager_steps(qwen3, expected, monkeypatch, options):
    with make_llm(qwen3, **options) as llm:
        replays = use_graphs(llm, monkeypatch)
        llm.engine.runner.kv_cache.fill_(float("nan"))
        assert tokens_of(llm, PROMPTS, PARAMS) == expected
        assert tokens_of(llm, PROMPTS[::-1], PARAMS) == expected[::-1], "with every prefix in the cache"
        assert sum(replays["DecodeGraphs"].values()) > 5 and sum(replays["MixedGraphs"].values()) > 1
        if "num_kvcache_blocks" in options:
            assert llm.engine.scheduler.num_preemptions > 0


def test_a_prompt_as_long_as_the_model_allows(qwen3, monkeypatch):
    """C1: block tables of max_model_len fit into the buffers that the graphs were captured with."""
    prompt = [5 + i % 90 for i in range(63)]
    params = SamplingParams(temperature=0, max_tokens=9, ignore_eos=True)
    with make_llm(qwen3, max_model_len=64, max_num_batched_tokens=200) as llm:
        plain = tokens_of(llm, [prompt, prompt[:60]], params)
        use_graphs(llm, monkeypatch)
        assert tokens_of(llm, [prompt, prompt[:60]], params) == plain
        assert [len(t) for t in plain] == [1, 4]


def test_the_smallest_graph_runs_when_few_are_left(qwen3, monkeypatch):
    """A long request in the last row ends alone: in the graph of one row, with its tokens and parameters."""
    params = [SamplingParams(temperature=0, max_tokens=3, ignore_eos=True)] * 11
    params += [SamplingParams(temperature=1.0, seed=3, max_tokens=40, ignore_eos=True)]
    with make_llm(qwen3, max_num_batched_tokens=200, overlap=True) as llm:
        plain = tokens_of(llm, PROMPTS[:12], params)
        replays = use_graphs(llm, monkeypatch)
        assert tokens_of(llm, PROMPTS[:12], params) == plain
    assert replays["DecodeGraphs"][1] >= 34


def test_the_fused_step_takes_few_rows_and_short_contexts(qwen3, expected, monkeypatch):
    """On CPU its place is taken by the layers, called as it is."""
    monkeypatch.setattr(step_graphs, "max_fused_rows", lambda config: 4)
    monkeypatch.setattr(step_graphs, "MAX_FUSED_TOKENS", 150)
    with make_llm(qwen3, max_num_seqs=7, max_num_batched_tokens=150) as llm:
        replays, runner = use_graphs(llm, monkeypatch), llm.engine.runner
        layers = runner.graphs[0]
        taken: list[tuple[int, int]] = []

        def decoder_step(token_ids, block_tables, context_lens, kv_cache):
            taken.append((len(token_ids), int(context_lens.sum())))
            assert kv_cache is runner.kv_cache and block_tables.shape == (
                len(token_ids),
                runner.rows.block_tables.shape[1],
            )
            return layers._logits(len(token_ids), {"context_lens": context_lens, "start_pos": context_lens - 1})

        monkeypatch.setattr(runner, "decoder_step", decoder_step)
        fused = step_graphs.FusedDecodeGraphs(runner, None)
        assert fused.buckets == [1, 2, 4]
        fused.capture()
        runner.graphs.insert(0, fused)
        taken.clear()
        for few in (1, 2, 4, len(PROMPTS)):
            assert tokens_of(llm, PROMPTS[:few], PARAMS) == expected[:few]
        assert {rows for rows, _ in taken} >= {1, 2} and all(rows <= 4 and tokens <= 150 for rows, tokens in taken)
        assert replays["DecodeGraphs"][7] > 0 and sum(replays["DecodeGraphs"].values()) > len(taken)


def test_rows_that_need_the_host_run_from_graphs_too(qwen3, monkeypatch):
    """Penalties, logprobs and the like are made of the graph's logits; sampled rows are beside them, and rows move."""
    lengths = [4, 30, 9, 17, 6, 25]
    kinds = [*SAMPLED, *(SamplingParams(temperature=0, logprobs=2, **o) for o in ({}, {"logit_bias": {7: 3.0}}))]
    params = [kinds[i % len(kinds)] for i in range(24)]
    params = [replace(p, max_tokens=lengths[i % 6], ignore_eos=True) for i, p in enumerate(params)]
    with make_llm(qwen3, max_num_batched_tokens=200, max_num_seqs=9, overlap=True) as llm:
        plain = llm.generate(PROMPTS[:24], params, use_tqdm=False)
        use_graphs(llm, monkeypatch)
        monkeypatch.setattr(llm.engine.runner, "_launch_eagerly", None)
        outputs = llm.generate(PROMPTS[:24], params, use_tqdm=False)
    for eager, graph in zip(plain, outputs):
        assert graph.token_ids == eager.token_ids
        for a, b in zip(eager.logprobs or [], graph.logprobs or [], strict=True):
            assert list(a) == list(b) and all(abs(a[t].logprob - b[t].logprob) < 1e-4 for t in a)


def test_batches_that_grow_and_shrink_past_every_border(qwen3, monkeypatch):
    """One request after the other joins, then they end in the order of their arrival."""
    count = 21
    params = [SamplingParams(temperature=0, max_tokens=25, ignore_eos=True) for _ in range(count)]
    with make_llm(qwen3, max_num_batched_tokens=200) as llm:
        plain = tokens_of(llm, PROMPTS[:count], params)
        replays = use_graphs(llm, monkeypatch)
        engine = llm.engine
        requests = []
        for prompt, p in zip(PROMPTS[:count], params):
            requests.append(engine.add_request(prompt, p))
            engine.step()
        while engine.has_work:
            engine.step()
        assert [engine.output(r).token_ids for r in requests] == plain
    assert all(replays["DecodeGraphs"][b] for b in (1, 2, 4, 8, 16)), replays
