import pytest
import reference
import torch

from nanovllm import ops


@pytest.mark.parametrize("num_tokens", [1, 3, 67])
@pytest.mark.parametrize("width", [1, 8, 17, 1009, 4104])
def test_accuracy(device: str, dtype: torch.dtype, num_tokens: int, width: int) -> None:
    torch.manual_seed(0)
    gate_up = (3 * torch.randn(num_tokens, 2 * width, device=device)).to(dtype)
    out = torch.full_like(gate_up[:, :width], float("nan"))
    ops.silu_and_mul(out, gate_up)
    reference.assert_accurate(out, reference.silu_and_mul, gate_up)


def test_relative_accuracy_over_the_range_of_exp(device: str, dtype: torch.dtype) -> None:
    gate = torch.linspace(-87, 89, 4001, device=device).to(dtype)
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    out = torch.full_like(gate_up[:, :4001], float("nan"))
    ops.silu_and_mul(out, gate_up)
    # half is subnormal below exp(-10): its spacing there is 2^-24.
    floor = 2.0**-25 if dtype == torch.float16 else 1e-38
    reference.assert_close(out, reference.silu_and_mul(gate_up.double()), atol=floor, rtol=2 * torch.finfo(dtype).eps)


def test_extremes(device: str, dtype: torch.dtype) -> None:
    inf, nan = float("inf"), float("nan")
    gate = torch.tensor([inf, -inf, nan, 0.0, -0.0, -1000.0, 1000.0], device=device).to(dtype)
    gate_up = torch.cat([gate, torch.ones_like(gate)])[None]
    out = torch.zeros_like(gate_up[:, :7])
    ops.silu_and_mul(out, gate_up)
    want = torch.tensor([[inf, nan, nan, 0.0, 0.0, 0.0, 1000.0]], device=device)
    reference.assert_close(out, want, atol=0, rtol=0)


def test_strided_rows(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide_in = torch.randn(5, 200, device=device).to(dtype)
    wide_out = torch.randn(5, 80, device=device).to(dtype)
    before, out = wide_out.clone(), wide_out[:, 8:72]
    ops.silu_and_mul(out, wide_in[:, 8:136])
    reference.assert_accurate(out, reference.silu_and_mul, wide_in[:, 8:136])
    reference.assert_same_bits(wide_out[:, :8], before[:, :8])
    reference.assert_same_bits(wide_out[:, 72:], before[:, 72:])


def test_no_tokens(device: str, dtype: torch.dtype) -> None:
    gate_up = torch.empty(0, 64, device=device, dtype=dtype)
    ops.silu_and_mul(gate_up[:, :32], gate_up)


def test_errors() -> None:
    out, gate_up = torch.zeros(3, 64), torch.zeros(3, 128)
    cases = [
        ((out, gate_up[:, 1:]), "gate_up: expected size 128 in dimension 1, got 127 of shape [3, 127]"),
        ((out, gate_up[1:]), "gate_up: expected num_tokens = 3 (from out) in dimension 0, got 2"),
        ((out, gate_up.double()), "gate_up: expected dtype float32 or bfloat16 on CPU, got float64"),
        ((out.bfloat16(), gate_up), "out: expected dtype float32, got bfloat16"),
        ((out, gate_up.T.contiguous().T), "gate_up: expected stride 1 in the last dimension, got 3"),
        ((out.T.contiguous().T, gate_up), "out: expected stride 1 in the last dimension, got 3"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.silu_and_mul(*args)
        assert str(error.value).startswith("silu_and_mul: " + message)
