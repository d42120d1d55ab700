"""The attention backends agree, whatever a step mixes; those that cannot run are refused with what they lack."""

import logging
import sys
from itertools import pairwise

import pytest
import reference
import torch
from torch import Tensor

from nanovllm import LLM
from nanovllm.config import EngineConfig
from nanovllm.layers.attention import Attention
from nanovllm.layers.attention_backends import FlashAttention, NativeAttention, TorchAttention, make_backend
from tests.engine.near_ties import NearTies
from tests.engine.test_end_to_end import OPTIONS, PARAMS, PROMPTS

pytestmark = pytest.mark.usefixtures("one_thread")

try:
    from flash_attn import flash_attn_with_kvcache  # flash-attn-4 has the package's name, but not this
except ImportError:
    flash_attn_with_kvcache = None
needs_flash_attn = pytest.mark.skipif(
    flash_attn_with_kvcache is None, reason="flash_attn cannot be imported: pip install flash-attn"
)
NAMES = ("plain", "block 1", "few blocks, overlap", "overlap, chunks")  # of OPTIONS


def make_llm(path, **options) -> LLM:
    return LLM(str(path), **{"device": "cpu", "dtype": "float32", "max_model_len": 128} | options)


def tokens_of(llm: LLM) -> list[list[int]]:
    return [o.token_ids for o in llm.generate(PROMPTS, PARAMS, use_tqdm=False)]


@pytest.mark.parametrize("kv_cache_dtype", ["auto", "fp8_e4m3"])
@pytest.mark.parametrize("name", NAMES)
def test_torch_gives_the_tokens_of_native(qwen3, name, kv_cache_dtype, caplog):
    """In fp32, twice: the second run reads cached prefixes. An fp8 cache holds the same bytes for both."""
    caplog.set_level(logging.INFO, "nanovllm")
    runs = []
    for backend in ("native", "torch"):
        options = OPTIONS[name] | {"attention_backend": backend, "kv_cache_dtype": kv_cache_dtype}
        with make_llm(qwen3, **options) as llm:
            runs.append((tokens_of(llm), tokens_of(llm)))
            assert llm.config.enforce_eager == (backend == "torch")
        assert f"{backend} attention" in caplog.messages[-1]
    assert runs[0] == runs[1]


# flash-attn itself needs a GPU: its functions by their contract, on the reference


def with_kvcache(q: Tensor, k_cache: Tensor, v_cache: Tensor, **given) -> Tensor:
    """flash_attn_with_kvcache of one query a sequence; q [B, 1, H, D], pages of 256."""
    assert k_cache.size(1) % 256 == 0 and given["causal"]
    out = torch.zeros_like(q)
    for b, n in enumerate(given["cache_seqlens"].tolist()):
        if n > 0:
            k, v = (reference.paged_rows(c, given["block_table"][b], n) for c in (k_cache, v_cache))
            out[b] = reference.attention(q[b], k, v, given["softmax_scale"])
    return out


def varlen(q: Tensor, k: Tensor, v: Tensor, **given) -> Tensor:
    """flash_attn_varlen_func; k and v packed, or pages with a block_table."""
    bounds_q, bounds_k = given["cu_seqlens_q"].tolist(), given["cu_seqlens_k"].tolist()
    assert given["causal"] and given["max_seqlen_q"] >= max(b - a for a, b in pairwise(bounds_q))
    assert given["max_seqlen_k"] >= max(b - a for a, b in pairwise(bounds_k))
    out = torch.zeros_like(q)
    for i, (begin, end) in enumerate(pairwise(bounds_q)):
        if given["block_table"] is None:
            keys, values = (x[bounds_k[i] : bounds_k[i + 1]] for x in (k, v))
        else:
            table, n = given["block_table"][i], bounds_k[i + 1] - bounds_k[i]
            keys, values = (reference.paged_rows(x, table, n) for x in (k, v))
        out[begin:end] = reference.attention(q[begin:end], keys, values, given["softmax_scale"])
    return out


@pytest.mark.parametrize("options", [{}, {"max_num_batched_tokens": 29, "overlap": True}], ids=["plain", "chunks"])
def test_flash_attn_is_called_by_its_contract(qwen3, options):
    with make_llm(qwen3, kvcache_block_size=256, **options) as llm:
        expected = tokens_of(llm)
        for layer in llm.engine.runner.model.modules():
            if isinstance(layer, Attention):
                layer.backend = FlashAttention(with_kvcache, varlen)
        assert tokens_of(llm) == expected


# What cannot run


def test_native_is_the_default():
    assert type(make_backend("auto", torch.device("cuda"))) is NativeAttention
    assert type(make_backend("native", torch.device("cpu"))) is NativeAttention
    assert type(make_backend("torch", torch.device("cuda"))) is TorchAttention


@pytest.mark.parametrize(
    "options, message",
    [
        ({}, "kvcache_block_size: attention_backend flash_attn needs a multiple of 256, got 16"),
        ({"kvcache_block_size": 128}, "needs a multiple of 256, got 128"),
        (
            {"kvcache_block_size": 256, "kv_cache_dtype": "fp8_e4m3"},
            r"kv_cache_dtype: attention_backend flash_attn reads a cache of the model's dtype \(auto\), got 'fp8_e4m3'",
        ),
    ],
)
def test_what_flash_attn_does_not_take_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        EngineConfig(model="m", attention_backend="flash_attn", **options)
    EngineConfig(model="m", attention_backend="flash_attn", kvcache_block_size=512)


def test_flash_attn_needs_cuda(qwen3):
    with pytest.raises(ValueError, match="flash_attn runs on CUDA, expected auto, native or torch on cpu"):
        make_llm(qwen3, attention_backend="flash_attn", kvcache_block_size=256)


def test_flash_attn_that_is_not_installed_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(ValueError, match=r"flash_attn needs the package flash-attn .* cannot be imported"):
        make_backend("flash_attn", torch.device("cuda"))


# On a GPU


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["native", "torch", pytest.param("flash_attn", marks=needs_flash_attn)])
def test_tokens_on_the_gpu_follow_transformers(qwen3, backend):
    """In bf16, each token is that of transformers in fp32, or one that bf16's own noise can turn it into."""
    ties = NearTies.of_tiny("Qwen3ForCausalLM", "cuda")
    size = 256 if backend == "flash_attn" else 16
    cuda = {"device": "cuda", "dtype": "bfloat16", "num_kvcache_blocks": 1000, "max_num_seqs": 64}
    for name, options in {"plain": {}, "chunks": {"max_num_batched_tokens": 37}}.items():
        with make_llm(qwen3, **cuda, kvcache_block_size=size, attention_backend=backend, **options) as llm:
            for run in ("cold", "warm"):
                outputs = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
                ties.check(PROMPTS, outputs, f"{backend}, {name}, {run}")
