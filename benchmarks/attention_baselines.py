"""Other libraries' attention under the same inputs, as baselines of the two attention benchmarks.

Each is used where it can be imported: `flash_attn` (FlashAttention-2), `flash_attn_interface` (3), `flash_attn.cute`
(4) and `flashinfer`. A maker plans and allocates, and returns the call that is timed. What a library refuses (a block
size, a dtype, this GPU) it says by raising, from the maker or from the call. FlashAttention-4 and FlashInfer compile
their kernels on first use, the latter for minutes.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec

import torch
from torch import Tensor

Call = Callable[[], object]


@dataclass(frozen=True)
class Decode:
    """One query token a sequence over a paged cache; caches [num_blocks, block_size, num_kv_heads, head_dim]."""

    q: Tensor  # [batch, num_q_heads, head_dim]
    k: Tensor
    v: Tensor
    tables: Tensor  # [batch, max_blocks] int32
    lens: Tensor  # [batch] int32


@dataclass(frozen=True)
class Prefill:
    """Whole prompts, packed, causal; q, k, v [num_tokens, heads, head_dim]."""

    q: Tensor
    k: Tensor
    v: Tensor
    cu: Tensor  # [batch + 1] int32
    max_len: int


def is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # of a parent
        return False


@cache
def flashinfer_workspace(user: str) -> Tensor:
    """XQA keeps semaphores in its own, which it expects to find at zero."""
    return torch.zeros(256 << 20, dtype=torch.uint8, device="cuda")


def decode_fa2(x: Decode) -> Call:
    from flash_attn import flash_attn_with_kvcache

    q = x.q.unsqueeze(1)
    return lambda: flash_attn_with_kvcache(q, x.k, x.v, cache_seqlens=x.lens, block_table=x.tables, causal=True)


def decode_fa3(x: Decode) -> Call:
    from flash_attn_interface import flash_attn_with_kvcache, get_scheduler_metadata

    q, max_len = x.q.unsqueeze(1), int(x.lens.max())
    shape = (len(q), 1, max_len, q.size(2), x.k.size(2), q.size(3))
    plan = get_scheduler_metadata(*shape, x.lens, q.dtype, page_size=x.k.size(1), causal=True)
    return lambda: flash_attn_with_kvcache(
        q, x.k, x.v, cache_seqlens=x.lens, page_table=x.tables, causal=True, scheduler_metadata=plan
    )


def decode_fa4(x: Decode) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    cu = torch.arange(len(x.q) + 1, dtype=torch.int32, device=x.q.device)
    return lambda: flash_attn_varlen_func(
        x.q, x.k, x.v, cu_seqlens_q=cu, seqused_k=x.lens, max_seqlen_q=1, page_table=x.tables, causal=True
    )


def decode_flashinfer(x: Decode, use_tensor_cores: bool) -> Call:
    import flashinfer

    block_size = x.k.size(1)
    used = -(-x.lens // block_size)
    first = torch.zeros(len(used) + 1, dtype=torch.int32, device=used.device)
    first[1:] = used.cumsum(0)
    ids = x.tables[torch.arange(x.tables.size(1), device=used.device) < used[:, None]]
    workspace = flashinfer_workspace("wrappers")
    wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(workspace, "NHD", use_tensor_cores=use_tensor_cores)
    last_page_lens = x.lens - (used - 1) * block_size
    heads = (x.q.size(1), x.k.size(2), x.q.size(2))
    wrapper.plan(first, ids, last_page_lens, *heads, block_size, q_data_type=x.q.dtype, kv_data_type=x.k.dtype)
    out = torch.empty_like(x.q, memory_format=torch.contiguous_format)
    q = x.q.contiguous()
    return lambda: wrapper.run(q, (x.k, x.v), out=out)


def decode_xqa(x: Decode) -> Call:
    from flashinfer.decode import xqa_batch_decode_with_kv_cache

    q, workspace, max_len = x.q.contiguous(), flashinfer_workspace("XQA"), int(x.lens.max())
    out, scale = torch.empty_like(q), q.size(-1) ** -0.5
    return lambda: xqa_batch_decode_with_kv_cache(
        q, (x.k, x.v), workspace, x.tables, x.lens, max_len, bmm1_scale=scale, out=out
    )


def prefill_torch_fa2(x: Prefill) -> Call:
    lens = (x.max_len, x.max_len)
    return lambda: torch.ops.aten._flash_attention_forward(x.q, x.k, x.v, x.cu, x.cu, *lens, 0.0, True, False)


def prefill_fa2(x: Prefill) -> Call:
    from flash_attn import flash_attn_varlen_func

    return lambda: flash_attn_varlen_func(x.q, x.k, x.v, x.cu, x.cu, x.max_len, x.max_len, causal=True)


def prefill_fa3(x: Prefill) -> Call:
    from flash_attn_interface import flash_attn_varlen_func

    return lambda: flash_attn_varlen_func(x.q, x.k, x.v, x.cu, x.cu, x.max_len, x.max_len, causal=True)


def prefill_fa4(x: Prefill) -> Call:
    from flash_attn.cute import flash_attn_varlen_func

    lens = {"max_seqlen_q": x.max_len, "max_seqlen_k": x.max_len}
    return lambda: flash_attn_varlen_func(x.q, x.k, x.v, cu_seqlens_q=x.cu, cu_seqlens_k=x.cu, causal=True, **lens)


def prefill_flashinfer(x: Prefill) -> Call:
    import flashinfer

    wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(flashinfer_workspace("wrappers"), "NHD")
    heads = (x.q.size(1), x.k.size(1), x.q.size(2))
    wrapper.plan(x.cu, x.cu, *heads, causal=True, q_data_type=x.q.dtype)
    q, k, v = (t.contiguous() for t in (x.q, x.k, x.v))
    out = torch.empty_like(q)
    return lambda: wrapper.run(q, k, v, out=out)


DECODE = [
    ("FA2", "flash_attn.flash_attn_interface", decode_fa2),
    ("FA3", "flash_attn_interface", decode_fa3),
    ("FA4", "flash_attn.cute", decode_fa4),
    ("FlashInfer", "flashinfer", partial(decode_flashinfer, use_tensor_cores=False)),
    ("FlashInfer, tensor cores", "flashinfer", partial(decode_flashinfer, use_tensor_cores=True)),
    ("FlashInfer, XQA", "flashinfer", decode_xqa),
]
PREFILL = [
    ("torch FA2", "torch", prefill_torch_fa2),
    ("FA2", "flash_attn.flash_attn_interface", prefill_fa2),
    ("FA3", "flash_attn_interface", prefill_fa3),
    ("FA4", "flash_attn.cute", prefill_fa4),
    ("FlashInfer", "flashinfer", prefill_flashinfer),
]


def decode_baselines() -> Iterator[tuple[str, Callable[[Decode], Call]]]:
    return ((name, make) for name, module, make in DECODE if is_importable(module))


def prefill_baselines() -> Iterator[tuple[str, Callable[[Prefill], Call]]]:
    return ((name, make) for name, module, make in PREFILL if is_importable(module))
