import importlib

import torch
from torch import Tensor

from nanovllm.ops._library import HAS_CUDA

MAX_ROWS = 256
"""More rows than this are refused."""
SQUARES_WIDTH = 64
"""Elements of a row that one partial sum of squares is of."""

_op = torch.ops.nanovllm.decode_linear.default


def decode_linear(
    out: Tensor,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    squares: Tensor | None = None,
    eps: float = 0.0,
    *,
    silu_and_mul: bool = False,
    weight_complete: bool = False,
    workspace: Tensor | None = None,
) -> None:
    """out = y, or silu(gate) * up of y = gate beside up, where y = x @ weight.T / rms + bias for up to 256 rows.

    fp32 inside; y is rounded once, and silu_and_mul reads it rounded: the bits are those of the operators apart.

    On CUDA for Hopper alone (`decode_linear_runs_on`), and made for the products of a decode step: bound by reading
    the weight, whose first part is on its way to shared memory while the previous kernel still runs.

    Args:
        out: [num_rows, out_features], or [num_rows, out_features / 2] with silu_and_mul, like x, written; last
            dimension contiguous, row stride free.
        x: [num_rows, in_features] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; num_rows 0..256,
            in_features a multiple of 8; last dimension contiguous; on CUDA the address is a multiple of 16 bytes and
            the row stride of 8 elements.
        weight: [out_features, in_features] dtype of x, with gate rows above up rows for silu_and_mul; layout as x.
        bias: [out_features] dtype of x, contiguous; None adds nothing.
        squares: [ceil(in_features / 64), num_rows] float32, contiguous: sums of squares that decode_linear_add left,
            and x is its `scaled`; then rms = sqrt(sum of squares / in_features + eps). None: rms = 1.
        eps: added to the mean square.
        weight_complete: the promise that weight and bias were written before the previous kernel of the stream
            began, as a model's are. It changes nothing on CPU.
        workspace: [>= decode_linear_workspace_numel(device)] int32, contiguous, all -1 before the first call;
            every call leaves it ready for the next, which may not overlap it. With one, up to 32 rows and a weight of
            more than 2^24 elements are spread evenly over the GPU. None, or on CPU: unused.
    Raises:
        RuntimeError: a shape, dtype, stride, address or device does not fit; the text names it.
    """
    _op(out, x, weight, bias, squares, eps, silu_and_mul, weight_complete, workspace)


def decode_linear_workspace_numel(device: torch.device | str) -> int:
    """int32 elements of a workspace: what multiprocessors that share outputs leave for each other."""
    sms = torch.cuda.get_device_properties(device).multi_processor_count
    return sms * 128 * 32


def decode_linear_runs_on(device: torch.device) -> bool:
    """Whether decode_linear and decode_linear_add have a kernel for this device in this build."""
    if device.type != "cuda":
        return True
    built = HAS_CUDA and "9.0a" in importlib.import_module("nanovllm._C_cuda").cuda_archs
    return built and torch.cuda.get_device_capability(device) == (9, 0)


def decode_squares_shape(width: int, num_rows: int) -> tuple[int, int]:
    """Shape of the partial sums of squares of [num_rows, width]."""
    return -(-width // SQUARES_WIDTH), num_rows
