import torch
from torch import Tensor

MAX_ROWS = 16
"""More rows than this are refused: torch.nn.functional.linear is the faster one there."""

_op = torch.ops.nanovllm.skinny_linear.default


def skinny_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    """out = x @ weight.T + bias for up to 16 rows, bound by reading the weight once; fp32 inside, rounded once.

    A row's result is bitwise the same whatever other rows are in x.

    Args:
        out: [num_rows, out_features] like x, written; last dimension contiguous, row stride free.
        x: [num_rows, in_features] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; num_rows 0..16, last
            dimension contiguous, row stride free.
        weight: [out_features, in_features] dtype of x; last dimension contiguous, row stride free.
        bias: [out_features] dtype of x, contiguous; None adds nothing.
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit, or there are more than 16 rows; the text names it.
    """
    _op(out, x, weight, bias)
