"""The comparison helpers can fail: a harness that always passes proves nothing."""

import pytest
import reference
import torch

NAN, INF = float("nan"), float("inf")


def test_assert_close_names_the_worst_coordinate() -> None:
    want = torch.zeros(2, 3)
    got = want.clone()
    got[0, 1], got[1, 2] = 0.2, 0.5
    with pytest.raises(AssertionError, match=r"worst at \(1, 2\): got 0.5, expected 0 .* 66.67% within"):
        reference.assert_close(got, want, atol=0.1, rtol=0)
    reference.assert_close(got, want, atol=0.5, rtol=0)


@pytest.mark.parametrize("bad, kind", [(NAN, "NaN"), (INF, r"\+inf"), (-INF, "-inf")])
def test_assert_close_compares_masks_first(bad: float, kind: str) -> None:
    with pytest.raises(AssertionError, match=rf"{kind} differs in 1, first \(1,\)"):
        reference.assert_close(torch.tensor([0.0, bad]), torch.zeros(2), atol=1e9, rtol=1e9)
    both = torch.tensor([0.0, bad])
    reference.assert_close(both, both.clone(), atol=0, rtol=0)


def test_assert_accurate_allows_twice_the_naive_error() -> None:
    def square(x: torch.Tensor) -> torch.Tensor:
        return (x + 1).pow(2) - 2 * x - 1  # cancels: the naive version in bfloat16 is off

    x = torch.linspace(0.1, 3, 64).bfloat16()
    reference.assert_accurate(x.double().pow(2).bfloat16(), square, x)
    with pytest.raises(AssertionError, match="result 0: worst at"):
        reference.assert_accurate((x.double().pow(2) + 0.5).bfloat16(), square, x)


def test_assert_same_bits() -> None:
    x = torch.tensor([0.0, NAN])
    reference.assert_same_bits(x, x.clone())
    with pytest.raises(AssertionError, match=r"1 of 2 differ, first at \(0,\): got -0.0, expected 0.0"):
        reference.assert_same_bits(torch.tensor([-0.0, NAN]), x)
    with pytest.raises(AssertionError, match="expected"):
        reference.assert_same_bits(x.double(), x)


def test_attention_of_one_query_is_a_softmax_over_all_keys() -> None:
    torch.manual_seed(0)
    q, k, v = torch.randn(1, 4, 8), torch.randn(5, 2, 8), torch.randn(5, 2, 8)
    for head in range(4):
        weights = torch.softmax(k[:, head // 2] @ q[0, head] * 0.3, 0)
        want = weights @ v[:, head // 2]
        got = reference.attention(q, k, v, 0.3)[0, head]
        reference.assert_close(got, want, atol=1e-6, rtol=0)
