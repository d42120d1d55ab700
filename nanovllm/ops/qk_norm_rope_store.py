import torch
from torch import Tensor

_op = torch.ops.nanovllm.qk_norm_rope_store.default


def qk_norm_rope_store(
    qkv: Tensor,
    q_weight: Tensor | None,
    k_weight: Tensor | None,
    cos_sin: Tensor,
    positions: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None,
    v_scale: Tensor | None,
    num_q_heads: int,
    num_kv_heads: int,
    eps: float,
) -> None:
    """All that a layer does between its qkv projection and attention, in one pass over qkv.

    q, k = rotary(rms_norm(q) * q_weight), rotary(rms_norm(k) * k_weight), per head, in place in qkv; then
    k and v go to their slots as in `store_kv_cache`. fp32 from the norm through the rotation, rounded once at
    the store (`rms_norm` then `rotary_embedding` round twice).

    Args:
        qkv: [num_tokens, (num_q_heads + 2 * num_kv_heads) * head_dim] float32 or bfloat16 on CPU, bfloat16 or
            float16 on CUDA, the q part and k part updated; last dimension contiguous, row stride free.
        q_weight, k_weight: [head_dim] dtype of qkv, contiguous; None: no norm of that part.
        cos_sin: [max_pos, rotary_dim] float32, contiguous; cos half, then sin half; rotary_dim even, at most
            head_dim.
        positions: [num_tokens] int64, contiguous, in [0, max_pos).
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] dtype of qkv or float8_e4m3fn,
            written; head_dim contiguous, other strides free; block_size a power of two; num_blocks may be 0.
        slots: [num_tokens] int64, contiguous; -1 writes nothing. Two tokens never share a slot.
        k_scale, v_scale: [1] float32, for a float8 cache only; None means 1.
        num_q_heads, num_kv_heads: how a row of qkv splits.
        eps: added to the mean square of a head.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; on CPU also a position outside the table
            or a slot outside the cache, with nothing written. CUDA would have to wait for the device to see
            those: there the caller answers for them.
    Source: the q and k norms of Qwen3, RoFormer's rotation, and nano-vLLM's `store_kvcache`, fused.
    """
    _op(
        qkv,
        q_weight,
        k_weight,
        cos_sin,
        positions,
        k_cache,
        v_cache,
        slots,
        k_scale,
        v_scale,
        num_q_heads,
        num_kv_heads,
        eps,
    )
