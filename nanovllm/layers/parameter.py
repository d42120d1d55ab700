"""Parameters that know which checkpoint tensors fill them."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from nanovllm.parallel.shards import Slice, whole

Shard = str | int | None  # which part of a fused parameter; None: all of a plain one


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """The quantised blocks that a dense weight [out, in] was made from, for ops.skinny_linear_gguf."""

    blocks: Tensor  # [out, bytes of a row] uint8
    quant_type: int


def make_parameter(
    shape: tuple[int, ...], dtype: torch.dtype, shards: dict[Shard, Slice] | None = None
) -> nn.Parameter:
    """An uninitialised parameter with the two attributes that the weight loader uses.

    `shards` maps each shard, in storage order, to what it holds of its checkpoint tensor. `weight_loader(param, tensor,
    shard)` copies such a tensor in, converting dtype and device.
    """
    param = nn.Parameter(torch.empty(shape, dtype=dtype), requires_grad=False)
    param.shards = shards or {None: whole(shape[0])}
    param.weight_loader = load_shard
    return param


def shard_shape(param: nn.Parameter, shard: Shard) -> tuple[int, ...]:
    """Shape of the checkpoint tensor that fills a shard."""
    part = param.shards[shard]
    shape = [*param.shape]
    shape[part.dim] = part.full
    return tuple(shape)


@torch.no_grad()
def load_shard(param: nn.Parameter, tensor: Tensor, shard: Shard) -> None:
    """Copy `tensor`, the whole checkpoint tensor or the slice that the shard holds of it, into its place in `param`."""
    part = param.shards[shard]
    if tensor.shape[part.dim] != part.count:
        tensor = tensor.narrow(part.dim, part.start, part.count)
    shards = list(param.shards)
    first = sum(param.shards[before].size for before in shards[: shards.index(shard)])
    place = param.narrow(part.dim, first, part.size)
    place.narrow(part.dim, 0, part.count).copy_(tensor)
    place.narrow(part.dim, part.count, part.size - part.count).zero_()
