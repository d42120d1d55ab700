"""Which heads, columns and rows each rank has; which numbers of ranks are refused."""

import pytest

from nanovllm.parallel.shards import even_slice, head_shards

# (query heads, KV heads): the numbers of ranks up to the query heads that can share them
POSSIBLE = {
    (9, 3): [1, 2, 3, 9],
    (4, 2): [1, 2, 4],
    (8, 1): [1, 2, 4, 8],
    (16, 8): [1, 2, 3, 4, 8, 16],
    (4, 4): [1, 2, 4],
}


@pytest.mark.parametrize("heads", POSSIBLE, ids=str)
def test_every_head_is_on_the_rank_of_its_kv_head(heads):
    num_q, num_kv = heads
    for size in POSSIBLE[heads]:
        seen_q: list[int] = []
        for rank in range(size):
            shards = head_shards(num_q, num_kv, rank, size)
            assert shards.kv.count >= 1, "a rank with padding only"
            assert shards.q.size % shards.kv.size == 0
            group = shards.q.size // shards.kv.size
            for i in range(shards.q.count):
                kv_head = shards.kv.first + i // group
                assert (shards.q.first + i) // (num_q // num_kv) == kv_head
                seen_q.append(shards.q.first + i)
        assert seen_q == list(range(num_q))


@pytest.mark.parametrize("heads", POSSIBLE, ids=str)
def test_impossible_numbers_of_ranks_name_both_numbers(heads):
    num_q, num_kv = heads
    for size in set(range(1, 20)) - set(POSSIBLE[heads]):
        expected = f"{size} ranks cannot share {num_q} attention heads with {num_kv} key-value heads, expected one of "
        with pytest.raises(ValueError, match=expected + ", ".join(map(str, POSSIBLE[heads]))):
            head_shards(num_q, num_kv, 0, size)


@pytest.mark.parametrize("full", [8, 112, 199, 49152, 151936])
@pytest.mark.parametrize("size", [1, 2, 3, 4, 8])
def test_even_slices_cover_once(full, size):
    parts = [even_slice(full, rank, size) for rank in range(size)]
    assert len({p.size for p in parts}) == 1
    assert [i for p in parts for i in range(p.start, p.start + p.count)] == list(range(full))
    assert size == 1 or parts[0].size % 8 == 0
