"""The size of the KV-cache pool."""

import pytest

from nanovllm.engine.kv_cache import (
    MAX_PREFIX_BLOCKS,
    block_bytes,
    max_useful_blocks,
    num_blocks_in_bytes,
    num_blocks_on_gpu,
)

GIB = 1 << 30


def test_bytes_of_a_block_are_those_of_its_tensors() -> None:
    # K and V, 28 layers, 16 tokens, 8 heads of 128 bf16 elements
    assert block_bytes(28, 16, 8, 128, 2) == 2 * 28 * 16 * 8 * 128 * 2


def test_blocks_fill_the_share_of_the_gpu() -> None:
    # 80 * 0.9 = 72; 10 are used (our weights); the warm-up needed 6 beyond what it left: 56 are free for blocks of 4
    assert num_blocks_on_gpu(80, 70, peak=16, current=10, utilization=0.9, bytes_per_block=4, max_useful=99) == 14


def test_a_toy_model_does_not_get_a_pool_of_tens_of_millions_of_blocks() -> None:
    """Room for every sequence at its full length always, and for half a million blocks of cached prefixes."""
    assert max_useful_blocks(16, 256) == MAX_PREFIX_BLOCKS
    assert max_useful_blocks(4096, 8192) == 4096 * 8192
    assert num_blocks_on_gpu(140 * GIB, 140 * GIB, 0, 0, 0.9, 4096, max_useful_blocks(16, 256)) == MAX_PREFIX_BLOCKS


def test_c9_other_processes_count_and_the_error_has_every_number() -> None:
    # total 80, others 40, ours 5 now and 6 at the peak: 80 * 0.4 = 32 is less than what is used already
    with pytest.raises(ValueError) as error:
        num_blocks_on_gpu(
            80 * GIB, 35 * GIB, peak=6 * GIB, current=5 * GIB, utilization=0.4, bytes_per_block=1024, max_useful=99
        )
    text = str(error.value)
    for number in (f"total {80 * GIB}", "0.4", f"free: {35 * GIB}", f"needs {1024} bytes", f"processes: {45 * GIB}"):
        assert number in text
    assert "-" not in text.split("are left")[0].split("bytes and")[1]  # what is left is never negative
    # the same neighbour and a larger share: 80 * 0.8 - 45 - 1 = 18
    blocks = num_blocks_on_gpu(80 * GIB, 35 * GIB, 6 * GIB, 5 * GIB, 0.8, GIB, 99)
    assert blocks == 18


def test_cpu_pool_is_bounded_by_memory_and_by_use() -> None:
    assert num_blocks_in_bytes(1000, 10, max_useful=500) == 100
    assert num_blocks_in_bytes(1000, 10, max_useful=7) == 7
    with pytest.raises(ValueError, match=r"^kv_cache_memory_bytes: expected at least 1001 bytes .*, got 1000"):
        num_blocks_in_bytes(1000, 1001, 5)
