import torch
from torch import Tensor

_op = torch.ops.nanovllm.rms_norm.default


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    """out = x / sqrt(mean(x^2) + eps) * weight, per row; fp32 inside, rounded once at the store.

    Args:
        out: [num_tokens, hidden] like x, written; may be x itself.
        x: [num_tokens, hidden] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; last dimension
            contiguous, row stride free.
        weight: [hidden] dtype of x, contiguous.
        eps: added to the mean square.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; the text names it.
    Source: Zhang and Sennrich, Root Mean Square Layer Normalization (2019).
    """
    _op(out, x, weight, eps)
