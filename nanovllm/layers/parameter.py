"""Parameters that know which checkpoint tensors fill them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

Shard = str | int | None  # which part of a fused parameter; None: all of a plain one


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The quantised blocks that a dense weight [out, in] was made from, for ops.skinny_linear_gguf."""

    blocks: Tensor  # [out, bytes of a row] uint8
    quant_type: int


def make_parameter(shape: tuple[int, ...], dtype: torch.dtype, shards: dict[Shard, int] | None = None) -> nn.Parameter:
    """An uninitialised parameter with the two attributes that the weight loader uses.

    `shards` maps each shard, in storage order, to its rows; one checkpoint tensor [rows, *shape[1:]] fills
    each. `weight_loader(param, tensor, shard)` copies such a tensor in, converting dtype and device.
    """
    param = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    param.shards = shards or {None: shape[0]}
    param.weight_loader = load_shard
    return param


@torch.no_grad()
def load_shard(param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
    """Copy `tensor` [rows of the shard, ...] into its rows of `param`."""
    shards = list(param.shards)
    first = sum(param.shards[before] for before in shards[: shards.index(shard)])
    param.narrow(0, first, param.shards[shard]).copy_(tensor)
