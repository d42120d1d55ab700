import torch
from torch import Tensor

_op = torch.ops.nanovllm.skinny_linear_gguf.default


def skinny_linear_gguf(out: Tensor, x: Tensor, weight: Tensor, quant_type: int, bias: Tensor | None = None) -> None:
    """out = x @ w.T + bias for up to 16 rows, w the fp32 values of the quantised blocks; fp32 inside, rounded once.

    In float32 the result has the bits of skinny_linear on the dequantised weight, so a row's result does not depend on
    the other rows. CPU only.

    A weight row is in_features / 32 blocks side by side, without padding. Bytes of a block, fp16 little-endian:

        Q4_0, quant_type 2, 18 bytes: 0 fp16 d; 2 sixteen bytes q. Weight i < 16 is d * ((q[i] & 15) - 8), weight i + 16
            is d * ((q[i] >> 4) - 8).
        Q4_1, quant_type 3, 20 bytes: 0 fp16 d; 2 fp16 m; 4 sixteen bytes q. Weight i < 16 is d * (q[i] & 15) + m,
            weight i + 16 is d * (q[i] >> 4) + m.
        Q8_0, quant_type 8, 34 bytes: 0 fp16 d; 2 thirty-two int8 q. Weight i is d * q[i].

    Args:
        out: [num_rows, out_features] like x, written; last dimension contiguous, row stride free.
        x: [num_rows, in_features] float32 or bfloat16; num_rows 0..16, in_features a multiple of 32, last dimension
            contiguous, row stride free.
        weight: [out_features, in_features / 32 * bytes of a block] uint8; last dimension contiguous, row stride free.
        quant_type: 2, 3 or 8, as in gguf.GGMLQuantizationType.
        bias: [out_features] dtype of x, contiguous; None adds nothing.
    Raises:
        RuntimeError: another quant_type, a shape, dtype, stride or device that does not fit, or more than 16 rows; the
            text names it.
    Source: ggml/src/ggml-common.h and ggml-quants.c of https://github.com/ggml-org/ggml (block_q4_0, block_q4_1,
        block_q8_0).
    """
    _op(out, x, weight, quant_type, bias)
