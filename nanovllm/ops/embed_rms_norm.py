import torch
from torch import Tensor

_op = torch.ops.nanovllm.embed_rms_norm.default


def embed_rms_norm(out: Tensor, residual: Tensor, token_ids: Tensor, table: Tensor, weight: Tensor, eps: float) -> None:
    """residual = table[token_ids]; out = residual / sqrt(mean(residual^2) + eps) * weight: how a decoder begins.

    Has the bits of a lookup followed by `rms_norm`.

    Args:
        out, residual: [num_tokens, hidden] dtype of table, written; last dimension contiguous, row stride free.
        token_ids: [num_tokens] int64, contiguous, in [0, vocab).
        table: [vocab, hidden] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; last dimension contiguous, row
            stride free.
        weight: [hidden] dtype of table, contiguous.
        eps: added to the mean square.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; on CPU also an id outside the table, with nothing
            written (CUDA would have to wait for the device to see it: it reads row 0 then).
    Source: Zhang and Sennrich, Root mean square layer normalization (2019), for the norm.
    """
    _op(out, residual, token_ids, table, weight, eps)
