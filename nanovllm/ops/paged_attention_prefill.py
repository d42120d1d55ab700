import torch
from torch import Tensor

_op = torch.ops.nanovllm.paged_attention_prefill.default


def paged_attention_prefill(
    out: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    context_lens: Tensor,
    block_tables: Tensor | None,
    max_seqlen_q: int,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
) -> None:
    """out[i, h] = softmax(scale * q[i, h] . K^T) @ V over the keys that query i sees; fp32 inside, rounded once.

    Causal, aligned to the end of each context: query i of the q_len queries of sequence b sees its tokens
    0 .. context_lens[b] - q_len + i. Query head h reads KV head h // (num_q_heads // num_kv_heads).

    Args:
        out: [num_tokens, num_q_heads, head_dim] like q, written; last dimension contiguous, other strides free.
            Rows before cu_seqlens_q[0] and from cu_seqlens_q[batch] on are left as they are.
        q: [num_tokens, num_q_heads, head_dim] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; last
            dimension contiguous, other strides free. head_dim: a multiple of 8 on CPU; 64, 80, 96, 128 or 256 on
            CUDA.
        k, v: [num_tokens, num_kv_heads, head_dim], packed like q, where block_tables is None; else caches
            [num_blocks, block_size, num_kv_heads, head_dim] that hold the new tokens too. dtype of q, or
            float8_e4m3fn; last dimension contiguous, other strides free. Slots past a context may hold anything, NaN
            included. On CUDA rows of q, k and v are aligned to 16 bytes, and block_size is a power of two from 16.
        cu_seqlens_q: [batch + 1] int32, contiguous; the queries of sequence b are rows
            cu_seqlens_q[b] .. cu_seqlens_q[b + 1] - 1.
        context_lens: [batch] int32, contiguous, in tokens, the queries included; with packed k and v the number of
            queries.
        block_tables: [batch, max_blocks] int32, last dimension contiguous; token t of sequence b is in block
            block_tables[b, t // block_size], slot t % block_size. Entries past the context are never read. None:
            k and v are packed.
        max_seqlen_q: at least the most queries of a sequence.
        k_scale, v_scale: [1] float32, an fp8 cache holds k / k_scale; None: 1.
        scale: of the scores, usually head_dim ** -0.5; more than 0 on CUDA.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit, or (CPU) lengths contradict each other or a block
            id within a context is not in the cache; the text names it.
    Source: Dao, FlashAttention-2: faster attention with better parallelism and work partitioning (2023).
    """
    _op(out, q, k, v, cu_seqlens_q, context_lens, block_tables, max_seqlen_q, k_scale, v_scale, scale)
