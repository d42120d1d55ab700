import torch
from torch import Tensor

_op = torch.ops.nanovllm.decode_linear_add.default


def decode_linear_add(
    residual: Tensor,
    scaled: Tensor,
    squares: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm_weight: Tensor,
    *,
    weight_complete: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """residual += x @ weight.T + bias; scaled = residual * norm_weight; squares = partial sums of residual^2.

    The product is rounded before it is added, and the sum before the rest reads it: residual has the bits of
    `residual.add_(decode_linear(x))`. scaled and squares are an RMS norm of residual but for the division of each row
    by its rms, which the `decode_linear` that reads them does.

    On CUDA for Hopper alone (`decode_linear_runs_on`).

    Args:
        residual: [num_rows, out_features] like x, updated in place.
        scaled: [num_rows, out_features] like x, written.
        squares: [ceil(out_features / 64), num_rows] float32, contiguous, written; row i is of the columns
            64 i .. 64 i + 63.
        x: [num_rows, in_features] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; num_rows 0..256,
            in_features and out_features multiples of 8; last dimension contiguous; on CUDA the address is a multiple
            of 16 bytes and the row stride of 8 elements (so for residual, scaled and weight).
        weight: [out_features, in_features] dtype of x.
        bias: [out_features] dtype of x, contiguous; None adds nothing.
        norm_weight: [out_features] dtype of x, contiguous.
        weight_complete: the promise that weight and bias were written before the previous kernel of the stream
            began, as a model's are. It changes nothing on CPU.
        workspace: as in decode_linear.
    Raises:
        RuntimeError: a shape, dtype, stride, address or device does not fit; the text names it.
    """
    _op(residual, scaled, squares, x, weight, bias, norm_weight, weight_complete, workspace)
