import torch
from torch import Tensor

_op = torch.ops.nanovllm.add_rms_norm.default


def add_rms_norm(out: Tensor, residual: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """residual += x; out = residual / sqrt(mean(residual^2) + eps) * weight, per row.

    The sum is rounded to residual's dtype before the norm reads it, so the result has the bits of
    `residual.add_(x)` followed by `rms_norm`; the norm is fp32 inside and rounds once at the store.

    Args:
        out: [num_tokens, hidden] like x, written; may be x itself, not residual.
        residual: [num_tokens, hidden] like x, updated in place.
        x: [num_tokens, hidden] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; last dimension
            contiguous, row stride free (so for out and residual).
        weight: [hidden] dtype of x, contiguous.
        eps: added to the mean square.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; the text names it.
    Source: the fused add and norm of vLLM's layernorm kernels, over Zhang and Sennrich (2019).
    """
    _op(out, residual, x, weight, eps)
