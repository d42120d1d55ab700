"""How many blocks the KV-cache pool gets. Pure functions, so that every case is testable without a GPU."""

from __future__ import annotations


def block_bytes(num_layers: int, block_size: int, num_kv_heads: int, head_dim: int, element_bytes: int) -> int:
    """Bytes of one physical block: K and V of block_size tokens in every layer."""
    return 2 * num_layers * block_size * num_kv_heads * head_dim * element_bytes


# More than any but a toy model has room for: 8 million tokens in blocks of 16. A toy would fit tens of millions on a
# large GPU: each block is a Python object in the block manager, and so many take minutes to make.
MAX_PREFIX_BLOCKS = 1 << 19


def max_useful_blocks(max_running: int, max_blocks_per_seq: int) -> int:
    """Every sequence at its full length, or as many blocks of cached prefixes as there may be."""
    return max(max_running * max_blocks_per_seq, MAX_PREFIX_BLOCKS)


def num_blocks_on_gpu(
    total: int, free: int, peak: int, current: int, utilization: float, bytes_per_block: int, max_useful: int
) -> int:
    """Blocks that fit into `utilization` of a GPU, never more than max_useful.

    budget = total * utilization - used - (peak - current), with used = total - free: memory of all processes on the
    GPU, and peak - current the activations that the warm-up needed beyond what it left allocated.

    Args:
        total, free: bytes, from torch.cuda.mem_get_info.
        peak, current: bytes, allocated_bytes.all.{peak,current} of torch.cuda.memory_stats after the warm-up.
    Raises:
        ValueError: not even one block fits; the text holds every number.
    """
    used = total - free
    budget = int(total * utilization) - used - (peak - current)
    num_blocks = budget // bytes_per_block
    if num_blocks < 1:
        raise ValueError(
            f"no room for the KV cache: one block needs {bytes_per_block} bytes and {max(budget, 0)} are left of "
            f"total {total} * gpu_memory_utilization {utilization} (used by all processes: {used}, free: {free}, "
            f"activations: {peak - current}); raise gpu_memory_utilization or free memory"
        )
    return min(num_blocks, max_useful)


def num_blocks_in_bytes(memory_bytes: int, bytes_per_block: int, max_useful: int) -> int:
    """Blocks in memory_bytes, never more than max_useful (every sequence at its full length).

    Raises:
        ValueError: not even one block fits, with both numbers.
    """
    num_blocks = min(memory_bytes // bytes_per_block, max_useful)
    if num_blocks < 1:
        raise ValueError(
            f"kv_cache_memory_bytes: expected at least {bytes_per_block} bytes (one block), got {memory_bytes}"
        )
    return num_blocks
