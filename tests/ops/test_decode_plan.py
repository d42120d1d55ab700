from itertools import pairwise

import pytest
import torch

from nanovllm import ops

TILE = 256  # tokens, of the CPU kernels


def make_plan(context_lens: list[int], num_kv_heads: int) -> list[int]:
    plan = torch.full((ops.decode_plan_numel(len(context_lens), "cpu"),), -7, dtype=torch.int32)
    ops.decode_plan(plan, torch.tensor(context_lens, dtype=torch.int32), num_kv_heads, 16)
    return plan.tolist()


@pytest.mark.parametrize("num_kv_heads", [1, 3, 8])
@pytest.mark.parametrize("context_lens", [[], [0], [1], [5000], [256, 257, 0, 9000, 1], [700] * 40])
def test_items_cover_the_contexts(context_lens: list[int], num_kv_heads: int) -> None:
    plan = make_plan(context_lens, num_kv_heads)
    items = [end - begin for begin, end in pairwise(plan)]
    tiles = [max(1, -(-n // TILE)) for n in context_lens]
    assert plan[0] == 0
    assert all(i in (1, t) for i, t in zip(items, tiles, strict=True))


def test_a_lone_long_context_is_split_and_many_are_not() -> None:
    assert make_plan([5000], 1) == [0, 20]
    assert make_plan([300] * 64 * torch.get_num_threads(), 1)[-1] == 64 * torch.get_num_threads()
    assert make_plan([0, 100_000, 7], 1)[1:] == [1, 392, 393]


def test_errors() -> None:
    lens = torch.ones(3, dtype=torch.int32)
    cases = [
        ((lens.clone(), lens, 1, 16), "plan: expected at least 4 elements for a batch of 3, got 3"),
        ((lens.long(), lens, 1, 16), "plan: expected dtype int32, got int64"),
        ((torch.zeros(4, dtype=torch.int32), lens, 0, 16), "num_kv_heads: expected at least 1, got 0"),
        ((torch.zeros(4, dtype=torch.int32), lens, 1, 0), "block_size: expected at least 1, got 0"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.decode_plan(*args)
        assert str(error.value).startswith("decode_plan: " + message)
