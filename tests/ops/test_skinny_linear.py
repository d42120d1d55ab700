import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops


def make(rows: int, n: int, k: int, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out (NaN), x, weight, bias"""
    torch.manual_seed(0)
    x, weight, bias = (torch.randn(s, device=device).to(dtype) for s in ((rows, k), (n, k), (n,)))
    return x.new_full((rows, n), float("nan")), x, weight, bias


@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("n, k", [(1, 1), (3, 8), (4, 17), (67, 576), (131, 1009), (4096, 1024), (2100, 40)])
def test_accuracy(device: str, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    out, x, weight, bias = make(rows, n, k, device, dtype)
    ops.skinny_linear(out, x, weight)
    reference.assert_accurate(out, reference.linear, x, weight, None)
    ops.skinny_linear(out, x, weight, bias)
    reference.assert_accurate(out, reference.linear, x, weight, bias)


@pytest.mark.parametrize("k", [17, 64, 576])
def test_a_row_does_not_depend_on_the_others(device: str, dtype: torch.dtype, k: int) -> None:
    out, x, weight, bias = make(16, 67, k, device, dtype)
    ops.skinny_linear(out, x, weight, bias)
    for rows in range(1, 16):
        some = out.new_full((rows, 67), float("nan"))
        ops.skinny_linear(some, x[16 - rows :], weight, bias)
        reference.assert_same_bits(some, out[16 - rows :], f"last {rows} rows")


def test_strided_rows(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide_out, wide_x, wide_weight = (torch.randn(s, 100, device=device).to(dtype) for s in (5, 5, 32))
    before, out, x, weight = wide_out.clone(), wide_out[:, 8:40], wide_x[:, 16:80], wide_weight[:, 24:88]
    ops.skinny_linear(out, x, weight)
    reference.assert_accurate(out, reference.linear, x, weight, None)
    reference.assert_same_bits(wide_out[:, :8], before[:, :8])
    reference.assert_same_bits(wide_out[:, 40:], before[:, 40:])


def test_empty_dimensions(device: str, dtype: torch.dtype) -> None:
    for rows, n in ((0, 4), (3, 0)):
        ops.skinny_linear(*make(rows, n, 8, device, dtype))
    out, x, weight, bias = make(2, 5, 0, device, dtype)
    ops.skinny_linear(out, x, weight, bias)
    reference.assert_same_bits(out, bias.expand(2, 5))


def test_errors() -> None:
    out, x, weight, bias = make(3, 5, 8, "cpu", torch.float32)
    cases = [
        (make(17, 5, 8, "cpu", torch.float32), "x: expected at most 16 rows, got 17"),
        ((out, x, weight[:, 1:]), "weight: expected in_features = 8 (from x) in dimension 1, got 7 of shape [5, 7]"),
        ((out[:, 1:], x, weight), "out: expected out_features = 5 (from weight) in dimension 1, got 4"),
        ((out, x, weight, bias[1:]), "bias: expected out_features = 5 (from weight) in dimension 0, got 4"),
        ((out, x.double(), weight), "x: expected dtype float32 or bfloat16 on CPU, got float64"),
        ((out, x, weight.bfloat16()), "weight: expected dtype float32, got bfloat16"),
        ((out, x, weight.T.contiguous().T), "weight: expected stride 1 in the last dimension, got 5"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.skinny_linear(*args)
        assert str(error.value).startswith("skinny_linear: " + message)
