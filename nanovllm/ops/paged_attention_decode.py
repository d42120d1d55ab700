import torch
from torch import Tensor

from nanovllm.ops.decode_plan import decode_grid

_op = torch.ops.nanovllm.paged_attention_decode.default
_CPU_TILE = 256  # tokens; kDecodeTile of csrc/cpu/paged.h
_CPU_MAX_SPLIT_SEQS = 16  # kMaxSplitSeqs of csrc/cpu/paged.h


def paged_attention_decode(
    out: Tensor,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: Tensor,
    workspace: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    scale: float,
    past_complete: bool = False,
) -> None:
    """out[b, h] = softmax(scale * q[b, h] . K[b]^T) @ V[b], K and V being the first context_lens[b] cached tokens.

    Sums in fp32, rounded once. On CPU a row's result is bitwise the same in any batch and with any number of threads;
    on CUDA in every run of the same batch (the weights are rounded to the dtype of q, float16 for an fp8 cache, before
    they meet the values).
    Query head h reads KV head h // (num_q_heads // num_kv_heads); a KV row is loaded once for its group.

    Args:
        out: [batch, num_q_heads, head_dim] like q, written; last dimension contiguous, other strides free. Rows with
            a context of 0 become 0.
        q: [batch, num_q_heads, head_dim] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; last dimension
            contiguous, other strides free. head_dim: a multiple of 8 on CPU; 64, 80, 96, 128 or 256 on CUDA.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] dtype of q, or float8_e4m3fn; last
            dimension contiguous, other strides free; on CUDA rows aligned to 16 bytes (so in q and out), block_size a
            power of two from 16, at most 16 query heads a KV head. Slots past a
            context may hold anything, NaN included.
        block_tables: [batch, max_blocks] int32, last dimension contiguous; token t of sequence b is in block
            block_tables[b, t // block_size], slot t % block_size. Entries past the context are never read.
        context_lens: [batch] int32, contiguous, in tokens, this step's token included.
        plan: from `decode_plan` of the same context_lens, num_kv_heads and block_size.
        workspace: [>= decode_workspace_numel(...)] float32, contiguous, overwritten; holds nothing between calls, but
            on CUDA it is zeros before the first one (counters, which every call leaves at zero).
        k_scale, v_scale: [1] float32, an fp8 cache holds k / k_scale; None: 1.
        scale: of the scores, usually head_dim ** -0.5.
        past_complete: True promises that `block_tables`, and keys and values of all but the last token of each context,
            were written before the `decode_plan` that made `plan` was called, on this stream. Only q and the last
            tokens may be newer, and CUDA reads the others while the kernel before this call still runs (garbage, if
            they are newer). False promises nothing. CPU ignores it.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit, or (CPU) a block id within a context is not in
            the cache; the text names it.
    Source: Dao, Haziza, Massa, Sizov, Flash-Decoding for long-context inference (2023).
    """
    _op(out, q, k_cache, v_cache, block_tables, context_lens, plan, workspace, k_scale, v_scale, scale, past_complete)


def decode_workspace_numel(
    max_num_seqs: int,
    max_context_len: int,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    device: torch.device | str,
) -> int:
    """float32 elements of a workspace for batches up to `max_num_seqs` with contexts up to `max_context_len`."""
    if torch.device(device).type != "cpu":
        blocks = decode_grid(device)
        return -(-blocks // 4) * 4 + blocks * 2 * (num_q_heads // num_kv_heads) * (head_dim + 4)
    tiles = -(-max_context_len // _CPU_TILE)
    return min(max_num_seqs, _CPU_MAX_SPLIT_SEQS) * tiles * num_q_heads * (head_dim + 2)
