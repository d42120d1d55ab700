"""C2: every batch size has a graph, also where max_num_seqs is no multiple of anything."""

from bisect import bisect_left

import pytest

from nanovllm.engine.step_graphs import batch_buckets


@pytest.mark.parametrize("max_rows", [1, 2, 3, 7, 9, 12, 16, 17, 20, 100, 200, 256, 257, 512, 1000])
def test_every_batch_has_a_bucket(max_rows):
    buckets = batch_buckets(max_rows)
    assert buckets == sorted(set(buckets)) and buckets[-1] == max_rows and buckets[0] == 1
    for size in range(1, max_rows + 1):
        bucket = buckets[bisect_left(buckets, size)]
        assert size <= bucket <= max(2 * size, size + 128)
