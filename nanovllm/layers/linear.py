import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm import ops
from nanovllm.layers.decode_linear import HalfNormed, decode_product, is_decode_product
from nanovllm.layers.layer import Layer
from nanovllm.layers.parameter import PackedWeight, Shard, make_parameter
from nanovllm.ops.skinny_linear import MAX_ROWS

_MAX_ROWS_BF16_ON_CPU = 4  # beyond, torch's product with the processor's bf16 instructions is faster
_MAX_OUT_ON_CUDA = 4096  # wider weights fill the GPU through cuBLAS


def _is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the operator that reads the weight once beats torch's matrix product, by benchmarks/bench_*skinny*."""
    if x.is_cuda:
        return x.shape[0] <= MAX_ROWS and weight.shape[0] <= _MAX_OUT_ON_CUDA
    return x.shape[0] <= (_MAX_ROWS_BF16_ON_CPU if x.dtype == torch.bfloat16 else MAX_ROWS)


def linear(
    x: Tensor | HalfNormed, weight: Tensor, bias: Tensor | None = None, packed: PackedWeight | None = None
) -> Tensor:
    """x @ weight.T + bias; for few rows by the operator that reads the weight once, on CPU its packed form if any.

    Args:
        x: [num_tokens, in] in the dtype of weight; half normed only where `is_decode_product`.
        weight: [out, in].
        bias: [out] or None.
        packed: the quantised form of weight, or None.
    Returns:
        [num_tokens, out].
    """
    if isinstance(x, HalfNormed) or is_decode_product(x.shape[0], weight):
        out = decode_product(x, weight, bias)
    elif packed is not None and x.shape[0] <= MAX_ROWS:
        out = x.new_empty(x.shape[0], weight.shape[0])
        ops.skinny_linear_gguf(out, x, packed.blocks, packed.quant_type, bias)
    elif _is_skinny(x, weight):
        out = x.new_empty(x.shape[0], weight.shape[0])
        ops.skinny_linear(out, x, weight, bias)
    else:
        out = F.linear(x, weight, bias)
    return out


class LinearBase(Layer):
    """y = x @ weight.T + bias; weight [out, in], of one or several checkpoint tensors stacked along out.

    The loader may set `packed`, the quantised form of weight: a decode step then reads that.
    """

    def __init__(self, input_size: int, shards: dict[Shard, int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        output_size = sum(shards.values())
        self.weight = make_parameter((output_size, input_size), dtype, shards)
        self.bias = make_parameter((output_size,), dtype, shards) if bias else None
        self.packed: PackedWeight | None = None

    def forward(self, x: Tensor | HalfNormed) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed)


class QKVParallelLinear(LinearBase):
    """The query, key and value projections in one: [T, hidden] -> [T, (num_q_heads + 2 num_kv_heads) *
    head_dim]."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_q_heads: int,
        num_kv_heads: int,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        kv_size = num_kv_heads * head_dim
        super().__init__(hidden_size, {"q": num_q_heads * head_dim, "k": kv_size, "v": kv_size}, bias, dtype)


class MergedColumnParallelLinear(LinearBase):
    """Several projections of one input, side by side in the output; shard i is the i-th."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool, dtype: torch.dtype) -> None:
        super().__init__(input_size, dict(enumerate(output_sizes)), bias, dtype)


class RowParallelLinear(LinearBase):
    """The projection back to the hidden size, after attention and in the MLP."""

    def __init__(self, input_size: int, output_size: int, bias: bool, dtype: torch.dtype) -> None:
        super().__init__(input_size, {None: output_size}, bias, dtype)
