"""Weights for load_format="dummy": benchmarks and tests of shapes that need no checkpoint."""

import torch
from torch import nn

from nanovllm.layers.parameter import shard_shape

_BOUND = 0.03  # uniform in [-bound, bound): activations of a normed decoder stay finite in fp16


@torch.no_grad()
def fill_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter with small random numbers, the same ones for the same seed, device type and dtype, on
    however many ranks: each makes the whole tensor of a checkpoint and keeps its part."""
    generators: dict[torch.device, torch.Generator] = {}
    for param in model.parameters():
        device = param.device
        if device not in generators:
            generators[device] = torch.Generator(device).manual_seed(seed)
        for shard in param.shards:
            values = torch.empty(shard_shape(param, shard), dtype=param.dtype, device=device)
            param.weight_loader(param, values.uniform_(-_BOUND, _BOUND, generator=generators[device]), shard)
