"""Products of few tokens on Hopper, which take the norms and the activation between them along."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from nanovllm import ops
from nanovllm.ops.decode_linear import MAX_ROWS

if TYPE_CHECKING:
    from nanovllm.layers.layernorm import RMSNorm
    from nanovllm.layers.linear import LinearBase

# Of a weight, by tokens; with few of them and a workspace there is no limit (csrc/kernels/decode_linear_stream.cuh).
_MAX_NUMEL, _MAX_NUMEL_OF_FEW, _FEW = 1 << 23, 1 << 24, 32
# Of a head: a weight of more rows than _TALL, and few tokens, whose x fits into shared memory.
_TALL, _TALL_X_NUMEL, _TALL_TOKENS = 1 << 15, 1 << 16, 64  # csrc/kernels/decode_linear_tall.cuh
_runs_on = functools.cache(ops.decode_linear_runs_on)


@dataclass(frozen=True, slots=True)
class HalfNormed:
    """An RMS norm of rows [num_tokens, hidden] but for their division by rms, which their reader does to its sums."""

    scaled: Tensor  # [num_tokens, hidden], rows * norm weight
    squares: Tensor  # [*ops.decode_squares_shape(hidden, num_tokens)] fp32, partial sums of squares of the rows
    eps: float

    @property
    def shape(self) -> torch.Size:
        return self.scaled.shape


def is_decode_product(num_tokens: int, weight: Tensor, workspace: Tensor | None) -> bool:
    """Whether ops.decode_linear is the fastest for this product, by benchmarks/bench_decode_linear.py."""
    if num_tokens <= _FEW:
        is_best = workspace is not None or weight.numel() <= _MAX_NUMEL_OF_FEW
    else:
        is_best = num_tokens <= MAX_ROWS and weight.numel() <= _MAX_NUMEL
    return is_best and _takes(weight)


def is_head_product(num_tokens: int, weight: Tensor) -> bool:
    """The same of a weight of very many rows, where neither a norm nor an activation goes along."""
    n, k = weight.shape
    is_tall = n > _TALL and num_tokens <= _TALL_TOKENS and max(16, num_tokens) * k <= _TALL_X_NUMEL
    return is_tall and _takes(weight)


def _takes(weight: Tensor) -> bool:
    return (
        weight.is_cuda
        and weight.dtype != torch.float32
        and weight.shape[0] % 8 == weight.shape[1] % 8 == 0
        and _runs_on(weight.device)
    )


def share_workspace(model: nn.Module, device: torch.device) -> None:
    """Gives the linear layers of a model, whose calls follow each other, a workspace for large weights, if the device
    has a use for it. Once, before graphs are captured: they keep its address."""
    if device.type != "cuda" or not _runs_on(device):
        return
    workspace = torch.full((ops.decode_linear_workspace_numel(device),), -1, dtype=torch.int32, device=device)
    for layer in model.modules():
        if hasattr(layer, "workspace"):
            layer.workspace = workspace


def decode_product(
    x: Tensor | HalfNormed,
    weight: Tensor,
    bias: Tensor | None,
    workspace: Tensor | None,
    silu_and_mul: bool = False,
) -> Tensor:
    """x @ weight.T + bias, or silu(gate) * up of it; of a product that it is for."""
    rows, squares, eps = (x.scaled, x.squares, x.eps) if isinstance(x, HalfNormed) else (x, None, 0.0)
    out = rows.new_empty(rows.shape[0], weight.shape[0] // (2 if silu_and_mul else 1))
    options = {"silu_and_mul": silu_and_mul, "weight_complete": True, "workspace": workspace}
    ops.decode_linear(out, rows, weight, bias, squares, eps, **options)
    return out


def add_and_norm(
    x: Tensor, layer: LinearBase, residual: Tensor, norm: RMSNorm, reader: LinearBase | None
) -> Tensor | HalfNormed:
    """residual += layer(x), in place; norm(residual), the half of it where `reader`, the layer that reads it, takes
    that."""
    num_tokens = x.shape[0]
    if (
        reader is None
        or norm.group.size > 1  # layer gives a part of a sum over the ranks, which the norm completes
        or not is_decode_product(num_tokens, layer.weight, layer.workspace)
        or not is_decode_product(num_tokens, reader.weight, reader.workspace)
    ):
        return norm(layer(x), residual)[0]
    scaled = torch.empty_like(residual)
    squares = residual.new_empty(ops.decode_squares_shape(residual.shape[1], num_tokens), dtype=torch.float32)
    options = {"weight_complete": True, "workspace": layer.workspace}
    ops.decode_linear_add(residual, scaled, squares, x, layer.weight, layer.bias, norm.weight, **options)
    return HalfNormed(scaled, squares, norm.eps)
