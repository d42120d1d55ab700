import torch
from torch import Tensor

_op = torch.ops.nanovllm.store_kv_cache.default


def store_kv_cache(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    slots: Tensor,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
) -> None:
    """Scatters new keys and values into the paged cache: for every token t with slot = slots[t] >= 0,

    k_cache[slot // block_size, slot % block_size] = k[t], and so for v.

    Bits are copied as they are; a float8 cache gets x / scale, rounded to nearest even, saturating at 448.

    Args:
        k, v: [num_tokens, num_kv_heads, head_dim] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA;
            head_dim contiguous, row and head strides free.
        k_cache, v_cache: [num_blocks, block_size, num_kv_heads, head_dim] dtype of k or float8_e4m3fn,
            written; head_dim contiguous, other strides free; block_size a power of two; num_blocks may be 0.
        slots: [num_tokens] int64, contiguous; -1 writes nothing. Two tokens never share a slot.
        k_scale, v_scale: [1] float32, for a float8 cache only; None means 1.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; on CPU also a slot outside the cache,
            with nothing written. CUDA would have to wait for the device to see it: there the caller answers
            for slots.
    Source: `reshape_and_cache_flash` of vLLM, the `store_kvcache` kernel of nano-vLLM.
    """
    _op(k, v, k_cache, v_cache, slots, k_scale, v_scale)
