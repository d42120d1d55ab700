import torch
from torch import Tensor

_op = torch.ops.nanovllm.rope_attention_decode.default
_CUDA_HEAD_DIMS = (64, 128)  # rotates_in_lanes of csrc/kernels/decode_newest.cuh


def rope_attention_decode(
    out: Tensor,
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_tables: Tensor,
    context_lens: Tensor,
    plan: Tensor,
    workspace: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    eps: float,
    scale: float,
    past_complete: bool = False,
) -> None:
    """All that a layer does between its qkv projection and its output projection, of one token a sequence.

    As `qk_norm_rope_store` of each row at position context_lens[b] - 1, into the slot that its block table has for it,
    and then `paged_attention_decode`; but qkv stays as it is. A row with a context of 0 stores nothing, and its out
    becomes 0.

    Args:
        out: [batch, num_q_heads, head_dim] like qkv, written; last dimension contiguous, other strides free.
        qkv: [batch, (num_q_heads + 2 * num_kv_heads) * head_dim] float32 or bfloat16 on CPU, bfloat16 or float16 on
            CUDA; last dimension contiguous, row stride free.
        q_weight, k_weight: [head_dim] dtype of qkv, contiguous; None: no norm of that part.
        cos_sin: [max_pos, rotary_dim] float32, contiguous; cos half, then sin half. On CUDA see
            `rope_attention_decode_takes`; on CPU rotary_dim is even and at most head_dim.
        k_cache, v_cache: as in `paged_attention_decode`, block_size a power of two on CPU too; the slot of each row's
            newest token is written.
        block_tables, context_lens, plan, workspace, k_scale, v_scale, scale: as there; a context is at most max_pos
            tokens, and no two rows have their newest token in the same slot.
        eps: added to the mean square of a head.
        past_complete: True promises that `block_tables`, and keys and values of all but the newest tokens, were
            written before the `decode_plan` that made `plan` was called, on this stream. CUDA reads them while the
            kernel before this call still runs then. CPU ignores it.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit, or (CPU) a block id within a context is not in
            the cache, or a context is longer than the table; the text names it.
    Source: the operators that it is made of.
    """
    _op(
        out,
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        k_cache,
        v_cache,
        block_tables,
        context_lens,
        plan,
        workspace,
        k_scale,
        v_scale,
        eps,
        scale,
        past_complete,
    )


def rope_attention_decode_takes(head_dim: int, rotary_dim: int, device: torch.device | str) -> bool:
    """Whether it takes heads of this shape: on CUDA 64 or 128 features that all rotate, on CPU any."""
    return torch.device(device).type == "cpu" or (head_dim in _CUDA_HEAD_DIMS and rotary_dim == head_dim)
