import pytest
import reference
import torch

from nanovllm import ops

EPS = 1e-5


@pytest.mark.parametrize("num_tokens", [1, 3, 67])
@pytest.mark.parametrize("hidden", [1, 8, 17, 576, 1009, 4096, 4099, 20480])
def test_has_the_bits_of_a_lookup_then_rms_norm(device: str, dtype: torch.dtype, num_tokens: int, hidden: int) -> None:
    torch.manual_seed(0)
    table = torch.randn(11, hidden, device=device).to(dtype)
    weight = torch.randn(hidden, device=device).to(dtype)
    token_ids = torch.randint(0, 11, (num_tokens,), device=device)
    rows = table[token_ids]
    want = torch.empty_like(rows)
    ops.rms_norm(want, rows, weight, EPS)
    out, residual = torch.full((2, num_tokens, hidden), float("nan"), device=device).to(dtype)
    ops.embed_rms_norm(out, residual, token_ids, table, weight, EPS)
    reference.assert_same_bits(residual, rows)
    reference.assert_same_bits(out, want)


def test_strided_rows(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(3, 5, 100, device=device).to(dtype)
    before = wide.clone()
    out, residual, table = wide[:, :, 8:72]
    ids, weight = torch.tensor([4, 0, 0, 3, 1], device=device), torch.ones(64, device=device, dtype=dtype)
    ops.embed_rms_norm(out, residual, ids, table, weight, EPS)
    reference.assert_same_bits(residual, before[2, :, 8:72][ids])
    reference.assert_accurate(out, reference.rms_norm, residual, weight, EPS)
    for part in (slice(8), slice(72, None)):
        reference.assert_same_bits(wide[:, :, part], before[:, :, part])


def test_no_tokens(device: str, dtype: torch.dtype) -> None:
    x, weight = torch.empty(0, 64, device=device, dtype=dtype), torch.ones(64, device=device, dtype=dtype)
    ops.embed_rms_norm(x, x.clone(), torch.empty(0, dtype=torch.int64, device=device), x, weight, EPS)


def test_errors() -> None:
    x, ids, weight = torch.zeros(3, 64), torch.zeros(3, dtype=torch.int64), torch.zeros(64)
    cases = [
        ((x, x[:2], ids, x, weight), "residual: expected num_tokens = 3 (from token_ids) in dimension 0, got 2"),
        ((x, x, ids, x[:, :8], weight), "out: expected hidden = 8 (from table) in dimension 1, got 64"),
        ((x, x, ids.int(), x, weight), "token_ids: expected dtype int64, got int32"),
        ((x, x.bfloat16(), ids, x, weight), "residual: expected dtype float32, got bfloat16"),
        ((x, x, ids, x[:0], weight), "table: expected at least one row, got 0"),
        ((x, x, ids + 3, x, weight), "token_ids: expected ids from 0 to below 3 (rows of table), got 3 at [0]"),
        ((x, x, ids - 1, x, weight), "token_ids: expected ids from 0 to below 3 (rows of table), got -1 at [0]"),
    ]
    for args, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.embed_rms_norm(*args, EPS)
        assert str(error.value).startswith("embed_rms_norm: " + message)
