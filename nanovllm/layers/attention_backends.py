"""Who computes attention over the paged cache: our operators, flash-attn, or plain torch. All read the same cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from nanovllm import ops
from nanovllm.engine.context import Context

if TYPE_CHECKING:
    from nanovllm.layers.attention import Attention


class AttentionBackend(ABC):
    """Attention of the rows of one Context, for any layer; has no state of a step.

    A layer brings its caches [num_blocks, block_size, num_kv_heads, head_dim], their scales (None: 1) and the scale of
    the scores. Where context.block_tables is None, prefill reads the packed keys and values of this forward, else the
    cache, which holds them already.
    """

    name: str
    graph_safe = True  # may be captured in a CUDA graph: reads nothing of the device on the host

    @abstractmethod
    def decode(self, layer: Attention, out: Tensor, q: Tensor, context: Context) -> None:
        """out, q: [D, num_q_heads, head_dim], one row a sequence; a row with a context of 0 may become anything."""

    @abstractmethod
    def prefill(self, layer: Attention, out: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> None:
        """out, q: [T, num_q_heads, head_dim], chunks one after the other; k, v: [T, num_kv_heads, head_dim]."""


class NativeAttention(AttentionBackend):
    """ops.paged_attention_decode and ops.paged_attention_prefill."""

    name = "native"

    def decode(self, layer: Attention, out: Tensor, q: Tensor, context: Context) -> None:
        ops.paged_attention_decode(
            out,
            q,
            layer.k_cache,
            layer.v_cache,
            context.decode_block_tables,
            context.decode_context_lens,
            context.plan,
            context.workspace,
            *layer.cache_scales,
            layer.scale,
            past_complete=True,  # since the step's plan, qk_norm_rope_store stored one token of each row
        )

    def prefill(self, layer: Attention, out: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> None:
        scales: tuple[Tensor | None, Tensor | None] = (None, None)
        if context.block_tables is not None:
            k, v, scales = layer.k_cache, layer.v_cache, layer.cache_scales
        ops.paged_attention_prefill(
            out,
            q,
            k,
            v,
            context.cu_seqlens_q,
            context.context_lens,
            context.block_tables,
            context.max_seqlen_q,
            *scales,
            layer.scale,
        )


class FlashAttention(AttentionBackend):
    """The flash-attn package, version 2: CUDA, blocks of a multiple of 256 tokens, no fp8 cache."""

    name = "flash_attn"

    def __init__(self, with_kvcache: Callable[..., Tensor], varlen: Callable[..., Tensor]) -> None:
        self._with_kvcache, self._varlen = with_kvcache, varlen

    def decode(self, layer: Attention, out: Tensor, q: Tensor, context: Context) -> None:
        result = self._with_kvcache(
            q[:, None],
            layer.k_cache,
            layer.v_cache,
            cache_seqlens=context.decode_context_lens,
            block_table=context.decode_block_tables,
            softmax_scale=layer.scale,
            causal=True,
        )
        out.copy_(result[:, 0])

    def prefill(self, layer: Attention, out: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> None:
        longest = context.max_seqlen_q
        if context.block_tables is not None:
            k, v = layer.k_cache, layer.v_cache
            longest = context.block_tables.size(1) * k.size(1)
        result = self._varlen(
            q,
            k,
            v,
            cu_seqlens_q=context.cu_seqlens_q,
            cu_seqlens_k=context.cu_seqlens_k,
            max_seqlen_q=context.max_seqlen_q,
            max_seqlen_k=longest,
            softmax_scale=layer.scale,
            causal=True,
            block_table=context.block_tables,
        )
        out.copy_(result)


class TorchAttention(AttentionBackend):
    """The reference: each sequence's pages gathered, then torch's scaled_dot_product_attention."""

    name = "torch"
    graph_safe = False  # lengths are read on the host

    def decode(self, layer: Attention, out: Tensor, q: Tensor, context: Context) -> None:
        for i, context_len in enumerate(context.decode_context_lens.tolist()):
            if context_len > 0:
                k, v = _gather(layer, context.decode_block_tables[i], context_len, q.dtype)
                out[i : i + 1] = _attend(q[i : i + 1], k, v, layer.scale)

    def prefill(self, layer: Attention, out: Tensor, q: Tensor, k: Tensor, v: Tensor, context: Context) -> None:
        bounds = context.cu_seqlens_q.tolist()
        for i, context_len in enumerate(context.context_lens.tolist()):
            rows = slice(bounds[i], bounds[i + 1])
            keys, values = k[rows], v[rows]
            if context.block_tables is not None:
                keys, values = _gather(layer, context.block_tables[i], context_len, q.dtype)
            out[rows] = _attend(q[rows], keys, values, layer.scale)


def _gather(layer: Attention, block_table: Tensor, context_len: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values [context_len, num_kv_heads, head_dim] of one sequence, in `dtype`."""
    blocks = block_table[: -(-context_len // layer.k_cache.size(1))].long()
    found = []
    for cache, scale in zip((layer.k_cache, layer.v_cache), layer.cache_scales):
        rows = cache.view(torch.uint8)[blocks].view(cache.dtype) if cache.dtype.itemsize == 1 else cache[blocks]
        rows = rows.flatten(0, 1)[:context_len]
        found.append(rows.to(dtype) if scale is None else (rows.float() * scale).to(dtype))
    return found[0], found[1]


def _attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Causal attention of q [Tq, Hq, D] over k, v [Tk, Hkv, D], aligned to the end."""
    num_q, num_k = len(q), len(k)
    mask = None
    if 1 < num_q < num_k:
        mask = torch.ones(num_q, num_k, dtype=torch.bool, device=q.device).tril(num_k - num_q)
    heads_first = (x.transpose(0, 1)[None] for x in (q, k, v))
    causal = num_q == num_k
    out = scaled_dot_product_attention(*heads_first, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=True)
    return out[0].transpose(0, 1)


def make_backend(name: str, device: torch.device) -> AttentionBackend:
    """The backend of an `attention_backend` option on a device; "auto" is native.

    Raises:
        ValueError: it cannot run here; the text says what is missing.
    """
    if name == "torch":
        return TorchAttention()
    if name != "flash_attn":
        return NativeAttention()
    if device.type != "cuda":
        raise ValueError(f"attention_backend: flash_attn runs on CUDA, expected auto, native or torch on {device.type}")
    try:
        from flash_attn import flash_attn_varlen_func, flash_attn_with_kvcache
    except ImportError as e:
        raise ValueError(
            "attention_backend: flash_attn needs the package flash-attn (version 2.7 or newer), which cannot be "
            f"imported: {e}"
        ) from e
    return FlashAttention(flash_attn_with_kvcache, flash_attn_varlen_func)
