"""The least time that a run's steps can take: what they must read, or compute, at the machine's best rates."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import nn

from nanovllm.bench.step_times import Step

if TYPE_CHECKING:
    from nanovllm.llm import LLM

_READ_BYTES = {"cuda": 2 << 30, "cpu": 256 << 20}  # far more than a cache holds
_MATMUL = {"cuda": 8192, "cpu": 1024}
_SECONDS = 0.05  # that a measurement lasts at least, for each of its repeats
_REPEATS = 5


@dataclass(frozen=True, slots=True)
class Machine:
    """bandwidth: bytes a second that reading reaches; compute: FLOP a second of a matrix product."""

    bandwidth: float
    compute: float

    @classmethod
    def measure(
        cls, device: torch.device, dtype: torch.dtype, bandwidth: float | None = None, compute: float | None = None
    ) -> Machine:
        """Measures what is not given; the memory that it needs is free again afterwards."""
        machine = cls(bandwidth or read_bandwidth(device), compute or matmul_rate(device, dtype))
        if device.type == "cuda":
            torch.cuda.empty_cache()
        return machine


@dataclass(frozen=True, slots=True)
class Cost:
    """What a token, or a step, costs a model at least."""

    weight_bytes: int  # read once a step: all weights, the embedding only where it is the head too
    kv_bytes: int  # of one token, all layers
    layer_flops: int  # of one token: the linear layers but the head
    head_flops: int  # of one sampled row
    attention_flops: int  # of one query and one key, all layers

    @classmethod
    def of(cls, llm: LLM) -> Cost:
        runner = llm.engine.runner
        config, model = runner.model_config, runner.model
        head = model.lm_head.weight
        gathered = {id(model.model.embed_tokens.weight)} - {id(head)}
        params = {id(p): p for p in model.parameters() if id(p) not in gathered}
        matrices = sum(p.numel() for i, p in params.items() if p.dim() == 2 and i != id(head))
        kv_heads_bytes = config.num_kv_heads * config.head_dim * runner.kv_cache.element_size()
        return cls(
            weight_bytes=sum(_bytes(model, p) for p in params.values()),
            kv_bytes=2 * config.num_layers * kv_heads_bytes,
            layer_flops=2 * matrices,
            head_flops=2 * head.numel(),
            attention_flops=4 * config.num_layers * config.num_q_heads * config.head_dim,
        )

    def bytes_of(self, step: Step) -> int:
        """Weights once, the cached context of every sequence once, and the new tokens' keys and values."""
        read = sum(end - 1 for end in step.decode_ends) + sum(start for start, _ in step.chunks)
        return self.weight_bytes + (read + step.num_tokens) * self.kv_bytes

    def flops_of(self, step: Step) -> int:
        pairs = sum(step.decode_ends) + sum((end * (end + 1) - start * (start + 1)) // 2 for start, end in step.chunks)
        return step.num_tokens * self.layer_flops + step.num_sampled * self.head_flops + pairs * self.attention_flops

    def floor(self, steps: Iterable[Step], machine: Machine) -> float:
        """Seconds: the greater of reading and computing, step by step."""
        return sum(max(self.bytes_of(s) / machine.bandwidth, self.flops_of(s) / machine.compute) for s in steps)


def _bytes(model: nn.Module, param: nn.Parameter) -> int:
    """Bytes of a weight; of its quantised blocks where a layer reads those."""
    for layer in model.modules():
        packed = getattr(layer, "packed", None)
        if packed is not None and layer.weight is param:
            return packed.blocks.nbytes
    return param.nbytes


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second of summing a large tensor, the best of some repeats."""
    x = torch.zeros(_READ_BYTES[device.type] // 4, device=device)
    return x.nbytes / _seconds(lambda: x.sum(), device)


def matmul_rate(device: torch.device, dtype: torch.dtype) -> float:
    """FLOP a second of a large square matrix product, the best of some repeats."""
    n = _MATMUL[device.type]
    a, b = torch.randn(2, n, n, device=device).to(dtype)
    return 2 * n**3 / _seconds(lambda: a @ b, device)


def _seconds(call: Callable[[], object], device: torch.device) -> float:
    """Seconds of one call: the best mean of some rounds, each long enough for the clock."""

    def round_of(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return (time.perf_counter() - start) / count

    round_of(1)
    count = max(1, round(_SECONDS / round_of(2)))
    return min(round_of(count) for _ in range(_REPEATS))
