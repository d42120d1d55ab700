import pytest
import reference
import torch

from nanovllm import ops

EPS = 1e-6


@pytest.mark.parametrize("num_tokens", [1, 3, 67])
@pytest.mark.parametrize("hidden", [1, 8, 17, 576, 1009, 4096, 4099, 20480])
def test_accuracy(device: str, dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(num_tokens, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    out = torch.full_like(x, float("nan"))
    ops.rms_norm(out, x, weight, EPS)
    reference.assert_accurate(out, reference.rms_norm, x, weight, EPS)


def test_strided_rows_and_in_place(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 100, device=device).to(dtype)
    before, x = wide.clone(), wide[:, 8:72]
    weight = torch.ones(64, device=device, dtype=dtype)
    ops.rms_norm(x, x, weight, EPS)
    reference.assert_accurate(x, reference.rms_norm, before[:, 8:72], weight, EPS)
    reference.assert_same_bits(wide[:, :8], before[:, :8])
    reference.assert_same_bits(wide[:, 72:], before[:, 72:])


def test_no_tokens(device: str, dtype: torch.dtype) -> None:
    x = torch.empty(0, 64, device=device, dtype=dtype)
    ops.rms_norm(x, x, torch.ones(64, device=device, dtype=dtype), EPS)


@pytest.mark.parametrize(
    "out, weight, message",
    [
        ((3, 64), (32,), "rms_norm: weight: expected hidden = 64 (from x) in dimension 0, got 32"),
        ((2, 64), (64,), "rms_norm: out: expected num_tokens = 3 (from x) in dimension 0, got 2"),
        ((3, 1, 64), (64,), "rms_norm: out: expected 2 dimensions, got 3 of shape [3, 1, 64]"),
    ],
)
def test_shape_errors(
    device: str, dtype: torch.dtype, out: tuple[int, ...], weight: tuple[int, ...], message: str
) -> None:
    x, out, weight = (torch.zeros(s, device=device, dtype=dtype) for s in ((3, 64), out, weight))
    with pytest.raises(RuntimeError) as error:
        ops.rms_norm(out, x, weight, EPS)
    assert str(error.value).startswith(message)


def test_dtype_and_stride_errors() -> None:
    x, weight = torch.zeros(3, 64), torch.zeros(64)
    with pytest.raises(RuntimeError, match="x: expected dtype float32 or bfloat16 on CPU, got float64"):
        ops.rms_norm(x.double(), x.double(), weight.double(), EPS)
    with pytest.raises(RuntimeError, match="rms_norm: weight: expected dtype float32, got bfloat16"):
        ops.rms_norm(x, x, weight.bfloat16(), EPS)
    with pytest.raises(RuntimeError, match="rms_norm: x: expected stride 1 in the last dimension, got 64"):
        ops.rms_norm(torch.zeros(64, 64), torch.zeros(64, 64).T, weight, EPS)
