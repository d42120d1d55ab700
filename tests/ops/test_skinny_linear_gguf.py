"""The blocks' values against the gguf package, their products against fp64, and the bits against skinny_linear."""

import numpy as np
import pytest
import reference
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from torch import Tensor

from nanovllm import ops

QUANTS = [GGMLQuantizationType.Q4_0, GGMLQuantizationType.Q4_1, GGMLQuantizationType.Q8_0]
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(params=QUANTS, ids=lambda quant: quant.name)
def quant(request: pytest.FixtureRequest) -> GGMLQuantizationType:
    return request.param


def make(rows: int, n: int, k: int, quant: GGMLQuantizationType, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """out (NaN), x, blocks, the dequantised weight, bias"""
    torch.manual_seed(0)
    x, bias = torch.randn(rows, k).to(dtype), torch.randn(n).to(dtype)
    blocks = quantize(np.random.default_rng(0).standard_normal((n, k), np.float32), quant).view(np.uint8)
    weight = torch.from_numpy(dequantize(blocks, quant))
    return x.new_full((rows, n), float("nan")), x, torch.from_numpy(blocks), weight, bias


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("rows", [1, 2, 3, 4, 7, 16])
@pytest.mark.parametrize("n, k", [(1, 32), (3, 64), (67, 576), (131, 1056)])
def test_against_fp64(quant: GGMLQuantizationType, dtype: torch.dtype, rows: int, n: int, k: int) -> None:
    out, x, blocks, weight, bias = make(rows, n, k, quant, dtype)
    exact = x.double() @ weight.double().T
    # fp32 sums of k terms, then one rounding to dtype
    size = x.double().abs() @ weight.double().abs().T + 4
    bound = size * 2e-6 + exact.abs() * (2**-8 if dtype == torch.bfloat16 else 0)
    for b, want in ((None, exact), (bias, exact + bias.double())):
        ops.skinny_linear_gguf(out, x, blocks, quant, b)
        error = (out.double() - want).abs()
        assert (error <= bound + want.abs() * (2**-8 if dtype == torch.bfloat16 else 0)).all(), error.max()


@pytest.mark.parametrize("rows", [1, 6, 16])
def test_same_bits_as_the_dense_operator(quant: GGMLQuantizationType, rows: int) -> None:
    out, x, blocks, weight, bias = make(rows, 67, 576, quant, torch.float32)
    ops.skinny_linear_gguf(out, x, blocks, quant, bias)
    want = torch.empty_like(out)
    ops.skinny_linear(want, x, weight, bias)
    reference.assert_same_bits(out, want)


def test_every_scale_and_every_quant(quant: GGMLQuantizationType) -> None:
    """Random bytes, all fp16 scales among them (subnormal and infinite ones too): the identity gives the weights."""
    size = {2: 18, 3: 20, 8: 34}[int(quant)]
    blocks = np.random.default_rng(1).integers(0, 256, (1 << 16, size), np.uint8)
    blocks[:, :2] = np.arange(1 << 16, dtype="<u2").view(np.uint8).reshape(-1, 2)
    with np.errstate(all="ignore"):
        weight = torch.from_numpy(dequantize(blocks, quant))
    for first in (0, 16):
        x = torch.eye(32)[first : first + 16]
        out = torch.full((16, len(blocks)), float("nan"))
        ops.skinny_linear_gguf(out, x, torch.from_numpy(blocks), quant)
        finite = weight.isfinite().all(dim=1)  # elsewhere 0 * inf makes the other sums NaN
        assert finite.sum() > 60_000
        assert torch.equal(out.T[finite], weight[finite][:, first : first + 16])
        assert not out.T[~finite].isfinite().all(dim=1).any()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_row_does_not_depend_on_the_others(quant: GGMLQuantizationType, dtype: torch.dtype) -> None:
    out, x, blocks, _, bias = make(16, 67, 576, quant, dtype)
    ops.skinny_linear_gguf(out, x, blocks, quant, bias)
    for rows in range(1, 16):
        some = out.new_full((rows, 67), float("nan"))
        ops.skinny_linear_gguf(some, x[16 - rows :], blocks, quant, bias)
        reference.assert_same_bits(some, out[16 - rows :], f"last {rows} rows")


def test_threads_do_not_change_a_bit(quant: GGMLQuantizationType) -> None:
    out, x, blocks, _, bias = make(3, 301, 576, quant, torch.float32)
    ops.skinny_linear_gguf(out, x, blocks, quant, bias)
    before, one = torch.get_num_threads(), torch.empty_like(out)
    try:
        torch.set_num_threads(1 if before > 1 else 2)
        ops.skinny_linear_gguf(one, x, blocks, quant, bias)
    finally:
        torch.set_num_threads(before)
    reference.assert_same_bits(one, out)


def test_strided_rows(quant: GGMLQuantizationType) -> None:
    _, _, blocks, weight, _ = make(1, 32, 64, quant, torch.float32)
    wide_out, wide_x = torch.randn(2, 5, 100)
    wide_blocks = torch.randint(0, 256, (32, blocks.shape[1] + 9), dtype=torch.uint8)
    wide_blocks[:, 5:-4] = blocks
    before, out, x = wide_out.clone(), wide_out[:, 8:40], wide_x[:, 16:80]
    ops.skinny_linear_gguf(out, x, wide_blocks[:, 5:-4], quant)
    torch.testing.assert_close(out, x @ weight.T, atol=1e-4, rtol=1e-5)
    reference.assert_same_bits(wide_out[:, :8], before[:, :8])
    reference.assert_same_bits(wide_out[:, 40:], before[:, 40:])


def test_empty_dimensions(quant: GGMLQuantizationType) -> None:
    for rows, n in ((0, 4), (3, 0)):
        out = torch.empty(rows, n)
        size = {2: 18, 3: 20, 8: 34}[int(quant)]
        ops.skinny_linear_gguf(out, torch.ones(rows, 32), torch.zeros(n, size, dtype=torch.uint8), quant)
    out, bias = torch.empty(2, 5), torch.randn(5)
    ops.skinny_linear_gguf(out, torch.empty(2, 0), torch.empty(5, 0, dtype=torch.uint8), quant, bias)
    reference.assert_same_bits(out, bias.expand(2, 5))


def test_errors() -> None:
    q8 = GGMLQuantizationType.Q8_0
    out, x, blocks, _, bias = make(3, 5, 64, q8, torch.float32)
    cases = [
        ((out, x, blocks, 12), "quant_type: expected one of 2 (Q4_0), 3 (Q4_1), 8 (Q8_0), got 12"),
        ((out, x, blocks, 2), "weight: expected size 36 in dimension 1, got 68 of shape [5, 68]"),
        ((out, x[:, 1:], blocks, q8), "x: expected in_features to be a multiple of 32, got 63"),
        ((out, x[0], blocks, q8), "x: expected 2 dimensions, got 1 of shape [64]"),
        ((out, x, blocks.char(), q8), "weight: expected dtype uint8, got "),
        ((out, x, blocks.T.contiguous().T, q8), "weight: expected stride 1 in the last dimension, got 5"),
        ((out, x.double(), blocks, q8), "x: expected dtype float32 or bfloat16 on CPU, got float64"),
        ((out[:, 1:], x, blocks, q8), "out: expected out_features = 5 (from weight) in dimension 1, got 4"),
        ((out, x, blocks, q8, bias[1:]), "bias: expected out_features = 5 (from weight) in dimension 0, got 4"),
        ((torch.empty(17, 5), torch.ones(17, 64), blocks, q8), "x: expected at most 16 rows, got 17"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.skinny_linear_gguf(*args)
        assert str(error.value).startswith("skinny_linear_gguf: " + message)
