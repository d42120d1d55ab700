import pytest

from nanovllm.bench.engine import Workload


def test_workload_is_in_range_and_repeatable() -> None:
    work = Workload.random(50, (3, 7), (2, 4), vocab_size=30, seed=1)
    assert {len(p) for p in work.prompts} == {3, 4, 5, 6, 7}
    assert set(work.output_lens) == {2, 3, 4}
    assert {t for p in work.prompts for t in p} == set(range(30))
    assert work == Workload.random(50, (3, 7), (2, 4), vocab_size=30, seed=1)
    assert work != Workload.random(50, (3, 7), (2, 4), vocab_size=30, seed=2)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((0, (1, 2), (1, 2)), "num_requests: expected at least 1, got 0"),
        ((1, (0, 2), (1, 2)), "input_len: expected 1 <= MIN <= MAX, got 0 2"),
        ((1, (1, 2), (5, 4)), "output_len: expected 1 <= MIN <= MAX, got 5 4"),
    ],
)
def test_workload_errors(arguments: tuple, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Workload.random(*arguments, vocab_size=10, seed=0)
