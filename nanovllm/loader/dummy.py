"""Weights for load_format="dummy": benchmarks and tests of shapes that need no checkpoint."""

import torch
from torch import nn

_BOUND = 0.03  # uniform in [-bound, bound): activations of a normed decoder stay finite in fp16


@torch.no_grad()
def fill_dummy(model: nn.Module, seed: int = 0) -> None:
    """Fill every parameter with small random numbers, the same ones for the same seed, device and dtype."""
    generators: dict[torch.device, torch.Generator] = {}
    for param in model.parameters():
        if param.device not in generators:
            generators[param.device] = torch.Generator(param.device).manual_seed(seed)
        param.uniform_(-_BOUND, _BOUND, generator=generators[param.device])
