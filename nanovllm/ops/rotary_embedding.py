import torch
from torch import Tensor

_op = torch.ops.nanovllm.rotary_embedding.default


def rotary_embedding(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> None:
    """Rotates every head of q and k in place, NeoX pairing: with h = rotary_dim / 2 and i < h,

    x[i], x[h + i] = x[i] * cos[i] - x[h + i] * sin[i], x[h + i] * cos[i] + x[i] * sin[i]

    fp32 inside, rounded once at the store; features from rotary_dim on stay as they are.

    Args:
        q: [num_tokens, num_q_heads, head_dim] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA,
            updated; head_dim contiguous, row and head strides free.
        k: [num_tokens, num_k_heads, head_dim] like q, updated.
        cos_sin: [max_pos, rotary_dim] float32, contiguous; cos half, then sin half; rotary_dim even, at most
            head_dim.
        positions: [num_tokens] int64, contiguous, in [0, max_pos).
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; on CPU also a position outside the table,
            with nothing written. CUDA would have to wait for the device to see it: there the caller answers
            for them.
    Source: Su et al., RoFormer (2021), in GPT-NeoX's pairing.
    """
    _op(q, k, cos_sin, positions)
