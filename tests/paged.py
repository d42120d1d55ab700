"""Paged caches of which all that an operator must not read is poisoned."""

from dataclasses import dataclass

import torch
from torch import Tensor

ABSURD = 2**31 - 1


@dataclass
class Paged:
    k: Tensor  # [num_blocks, block_size, num_kv_heads, head_dim], NaN in unused slots
    v: Tensor
    block_tables: Tensor  # [batch, max_blocks], distinct shuffled blocks, ABSURD or -1 past a context
    context_lens: Tensor  # [batch]


def make_paged(
    context_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    device: str,
    head_major: bool = False,
) -> Paged:
    """Random keys and values of the contexts; head_major: a block holds [num_kv_heads, block_size, head_dim]."""
    used = [-(-n // block_size) for n in context_lens]
    max_blocks = max(used, default=0) + 2
    num_blocks = sum(used) + 3
    order = torch.randperm(num_blocks)
    block_tables = torch.full((len(used), max_blocks), ABSURD, dtype=torch.int32)
    block_tables[:, -1] = -1
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k, v = (torch.full(shape, float("nan"), dtype=dtype) for _ in range(2))
    first = 0
    for b, (n, blocks) in enumerate(zip(context_lens, used)):
        ids = order[first : first + blocks]
        first += blocks
        block_tables[b, :blocks] = ids.int()
        slots = (ids[:, None] * block_size + torch.arange(block_size)).flatten()[:n]
        for cache in (k, v):
            cache.view(-1, num_kv_heads, head_dim)[slots] = torch.randn(n, num_kv_heads, head_dim).to(dtype)
    k, v = k.to(device), v.to(device)
    if head_major:
        k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k, v))
    lens = torch.tensor(context_lens, dtype=torch.int32, device=device)
    return Paged(k, v, block_tables.to(device), lens)


def make_shared(
    context_lens: list[int],
    num_kv_heads: int,
    head_dim: int,
    block_size: int,
    dtype: torch.dtype,
    head_major: bool = False,
    most_elements: int = 2**28,
) -> Paged:
    """The same on CUDA for contexts of any length: past `most_elements`, full blocks stand in several tables."""
    used = [-(-n // block_size) for n in context_lens]
    full_blocks = sum(max(0, blocks - 1) for blocks in used)
    shared = max(1, min(full_blocks, most_elements // (block_size * num_kv_heads * head_dim)))
    num_blocks = shared + len(used) + 1  # full blocks, the last block of each sequence, one that nobody uses
    names = torch.randperm(num_blocks, device="cuda").int()
    tables = torch.full((len(used), max(used, default=0) + 2), ABSURD, dtype=torch.int32, device="cuda")
    caches = torch.randn(2, num_blocks, block_size, num_kv_heads, head_dim, device="cuda")
    caches[:, names[-1].long()] = float("nan")
    begin = 0
    for b, (n, blocks) in enumerate(zip(context_lens, used)):
        if blocks == 0:
            continue
        tables[b, : blocks - 1] = names[torch.arange(begin, begin + blocks - 1, device="cuda") % shared]
        begin += blocks - 1
        tables[b, blocks - 1] = names[shared + b]
        caches[:, names[shared + b].long(), n - (blocks - 1) * block_size :] = float("nan")
    k, v = caches.to(dtype)
    if head_major:
        k, v = (c.transpose(1, 2).contiguous().transpose(1, 2) for c in (k, v))
    return Paged(k, v, tables, torch.tensor(context_lens, dtype=torch.int32, device="cuda"))
