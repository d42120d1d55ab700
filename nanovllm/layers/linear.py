import torch
import torch.nn.functional as F
from torch import Tensor

from nanovllm import ops
from nanovllm.layers.decode_linear import HalfNormed, decode_product, is_decode_product, is_head_product
from nanovllm.layers.layer import Layer
from nanovllm.layers.parameter import PackedWeight, Shard, make_parameter
from nanovllm.ops.skinny_linear import MAX_ROWS
from nanovllm.parallel.group import current_group
from nanovllm.parallel.shards import Slice, even_slice, head_shards, in_elements, whole

_MAX_ROWS_BF16_ON_CPU = 4  # beyond, torch's product with the processor's bf16 instructions is faster
_MAX_OUT_ON_CUDA = 4096  # wider weights fill the GPU through cuBLAS


def _is_skinny(x: Tensor, weight: Tensor) -> bool:
    """Whether the operator that reads the weight once beats torch's matrix product, by benchmarks/bench_*skinny*."""
    if x.is_cuda:
        return x.shape[0] <= MAX_ROWS and weight.shape[0] <= _MAX_OUT_ON_CUDA
    return x.shape[0] <= (_MAX_ROWS_BF16_ON_CPU if x.dtype == torch.bfloat16 else MAX_ROWS)


def linear(
    x: Tensor | HalfNormed,
    weight: Tensor,
    bias: Tensor | None = None,
    packed: PackedWeight | None = None,
    workspace: Tensor | None = None,
) -> Tensor:
    """x @ weight.T + bias; for few rows by the operator that reads the weight once, on CPU its packed form if any.

    Args:
        x: [num_tokens, in] in the dtype of weight; half normed only where `is_decode_product`.
        weight: [out, in].
        bias: [out] or None.
        packed: the quantised form of weight, or None.
        workspace: of `share_workspace`, or None.
    Returns:
        [num_tokens, out].
    """
    num_tokens = x.shape[0]
    is_decode = is_decode_product(num_tokens, weight, workspace) or is_head_product(num_tokens, weight)
    if isinstance(x, HalfNormed) or is_decode:
        out = decode_product(x, weight, bias, workspace)
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

    `shards` maps each of these to the slice that this rank holds. The loader may set `packed`, the quantised form of
    weight: a decode step then reads that. `share_workspace` may set `workspace`.
    """

    def __init__(self, input_size: int, shards: dict[Shard, Slice], bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        output_size = sum(part.size for part in shards.values())
        self.weight = make_parameter((output_size, input_size), dtype, shards)
        self.bias = make_parameter((output_size,), dtype, shards) if bias else None
        self.packed: PackedWeight | None = None
        self.workspace: Tensor | None = None

    def forward(self, x: Tensor | HalfNormed) -> Tensor:
        return linear(x, self.weight, self.bias, self.packed, self.workspace)


class QKVParallelLinear(LinearBase):
    """The query, key and value projections in one: [T, hidden] -> [T, (num_q_heads + 2 num_kv_heads) *
    head_dim], where num_q_heads and num_kv_heads (attributes) are this rank's."""

    def __init__(
        self,
        hidden_size: int,
        head_dim: int,
        num_q_heads: int,
        num_kv_heads: int,
        bias: bool,
        dtype: torch.dtype,
    ) -> None:
        group = current_group()
        heads = head_shards(num_q_heads, num_kv_heads, group.rank, group.size)
        q, kv = in_elements(heads.q, head_dim), in_elements(heads.kv, head_dim)
        super().__init__(hidden_size, {"q": q, "k": kv, "v": kv}, bias, dtype)
        self.num_q_heads, self.num_kv_heads = heads.q.size, heads.kv.size


class MergedColumnParallelLinear(LinearBase):
    """Several projections of one input, side by side in the output; shard i is the i-th, of which each rank has a
    share."""

    def __init__(self, input_size: int, output_sizes: list[int], bias: bool, dtype: torch.dtype) -> None:
        group = current_group()
        shards = {i: even_slice(size, group.rank, group.size) for i, size in enumerate(output_sizes)}
        super().__init__(input_size, shards, bias, dtype)


class RowParallelLinear(LinearBase):
    """The projection back to the hidden size, after attention and in the MLP: each rank has some of its inputs.

    Args:
        inputs: the slice of the inputs that this rank has; a number stands for an even share of them.
        reduce: return the sum over the ranks; else this rank's part of it, which the norm that follows sums.
    """

    def __init__(
        self, inputs: int | Slice, output_size: int, bias: bool, dtype: torch.dtype, reduce: bool = True
    ) -> None:
        group = current_group()
        if isinstance(inputs, int):
            inputs = even_slice(inputs, group.rank, group.size)
        super().__init__(inputs.size, {None: whole(output_size)}, bias, dtype)
        self.weight.shards = {None: inputs.along(1)}
        self.group, self.reduce = group, reduce

    def forward(self, x: Tensor) -> Tensor:
        bias = self.bias if self.group.rank == 0 else None  # once in the sum
        out = linear(x, self.weight, bias, self.packed, self.workspace)
        return self.group.all_reduce(out) if self.reduce else out
