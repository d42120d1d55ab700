"""Ranks as threads of one process, joined by gloo: what needs collectives but no processes."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import torch
import torch.distributed as dist

from nanovllm.parallel.gloo import GlooGroup
from nanovllm.parallel.group import use_group
from nanovllm.parallel.progress import Progress

T = TypeVar("T")


def run_ranks(size: int, work: Callable[[GlooGroup], T]) -> list[T]:
    """work(group) on every rank at once, within use_group(group); the results by rank."""
    store = dist.HashStore()

    def run(rank: int) -> T:
        group = GlooGroup(rank, size, Progress(), is_local=True, timeout=60)
        group.connect(store)
        with use_group(group), torch.inference_mode():
            return work(group)

    with ThreadPoolExecutor(size) as pool:
        return [f.result() for f in [pool.submit(run, r) for r in range(size)]]
