import torch
from torch import Tensor

_op = torch.ops.nanovllm.silu_and_mul.default


def silu_and_mul(out: Tensor, gate_up: Tensor) -> None:
    """out = silu(gate) * up, silu(x) = x / (1 + exp(-x)); fp32 inside, rounded once at the store.

    Args:
        out: [num_tokens, width] dtype of gate_up, written; must not overlap gate_up.
        gate_up: [num_tokens, 2 * width] float32 or bfloat16 on CPU, bfloat16 or float16 on CUDA; a row is the
            gate's width values, then up's. Last dimension contiguous, row stride free (so for out).
    Raises:
        RuntimeError: a shape, dtype, stride or device does not fit; the text names it.
    Source: Shazeer, GLU Variants Improve Transformer (2020).
    """
    _op(out, gate_up)
