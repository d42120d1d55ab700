import pytest
import reference
import torch

from nanovllm import ops

EPS = 1e-5


@pytest.mark.parametrize("num_tokens", [1, 3, 67])
@pytest.mark.parametrize("hidden", [1, 8, 17, 576, 1009, 4096, 4099, 20480])
def test_accuracy(device: str, dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    torch.manual_seed(0)
    x, residual = torch.randn(2, num_tokens, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    before, out = residual.clone(), torch.full_like(x, float("nan"))
    ops.add_rms_norm(out, residual, x, weight, EPS)
    reference.assert_accurate((out, residual), reference.add_rms_norm, before, x, weight, EPS)
    reference.assert_same_bits(residual, before + x)


def test_has_the_bits_of_an_addition_then_rms_norm(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    x, residual, separate = torch.randn(3, 5, 576, device=device).to(dtype)
    weight = torch.randn(576, device=device).to(dtype)
    ops.rms_norm(separate, residual + x, weight, EPS)
    ops.add_rms_norm(x, residual, x, weight, EPS)
    reference.assert_same_bits(x, separate)


def test_strided_rows(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(3, 5, 100, device=device).to(dtype)
    before = wide.clone()
    out, residual, x = wide[:, :, 8:72]
    weight = torch.ones(64, device=device, dtype=dtype)
    ops.add_rms_norm(out, residual, x, weight, EPS)
    reference.assert_accurate(
        (out, residual), reference.add_rms_norm, before[1, :, 8:72], before[2, :, 8:72], weight, EPS
    )
    reference.assert_same_bits(wide[:, :, :8], before[:, :, :8])
    reference.assert_same_bits(wide[:, :, 72:], before[:, :, 72:])


def test_no_tokens(device: str, dtype: torch.dtype) -> None:
    x = torch.empty(0, 64, device=device, dtype=dtype)
    ops.add_rms_norm(x, x.clone(), x, torch.ones(64, device=device, dtype=dtype), EPS)


def test_errors() -> None:
    x, weight = torch.zeros(3, 64), torch.zeros(64)
    cases = [
        ((x, x[:2], x, weight), "residual: expected num_tokens = 3 (from x) in dimension 0, got 2"),
        ((x, x[:, :8], x, weight), "residual: expected hidden = 64 (from x) in dimension 1, got 8"),
        ((x[0], x, x, weight), "out: expected 2 dimensions, got 1 of shape [64]"),
        ((x, x.bfloat16(), x, weight), "residual: expected dtype float32, got bfloat16"),
        ((x, x.T.contiguous().T, x, weight), "residual: expected stride 1 in the last dimension, got 3"),
        (
            (x, x, x, x.T.contiguous().T[0]),
            "weight: expected a contiguous tensor, got a strided one of shape",
        ),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.add_rms_norm(*args, EPS)
        assert str(error.value).startswith("add_rms_norm: " + message)
