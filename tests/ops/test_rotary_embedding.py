import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops

MAX_POS = 97


def rotate_both(q: Tensor, k: Tensor, cos_sin: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    return tuple(reference.rotary_embedding(x, cos_sin, positions) for x in (q, k))


@pytest.mark.parametrize("num_tokens", [1, 3, 67])
@pytest.mark.parametrize(
    "head_dim, rotary_dim", [(2, 2), (8, 8), (64, 64), (64, 32), (80, 80), (96, 24), (128, 128), (17, 0)]
)
def test_accuracy(device: str, dtype: torch.dtype, num_tokens: int, head_dim: int, rotary_dim: int) -> None:
    torch.manual_seed(0)
    q = torch.randn(num_tokens, 3, head_dim, device=device).to(dtype)
    k = torch.randn(num_tokens, 1, head_dim, device=device).to(dtype)
    cos_sin = reference.cos_sin_table(MAX_POS, rotary_dim, device=device)
    positions = torch.randint(0, MAX_POS, (num_tokens,), device=device)
    got = q.clone(), k.clone()
    ops.rotary_embedding(*got, cos_sin, positions)
    reference.assert_accurate(got, rotate_both, q, k, cos_sin, positions)
    for x, before in zip(got, (q, k)):
        reference.assert_same_bits(x[..., rotary_dim:], before[..., rotary_dim:])


def test_equals_the_rotation_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.llama.modeling_llama")
    torch.manual_seed(0)
    q, k = torch.randn(5, 4, 64), torch.randn(5, 2, 64)
    cos_sin, positions = reference.cos_sin_table(MAX_POS, 64), torch.tensor([0, 1, 50, 96, 7])
    cos, sin = (half.repeat(1, 2) for half in cos_sin[positions].chunk(2, dim=1))
    want = modeling.apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=1)
    ops.rotary_embedding(q, k, cos_sin, positions)
    for got, expected in zip((q, k), want):
        reference.assert_close(got, expected, atol=1e-6, rtol=0)


def test_strides(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    wide = torch.randn(5, 6, 96, device=device).to(dtype)
    before, q, k = wide.clone(), wide[:, :4, 16:80], wide[:, 4:, 16:80]
    cos_sin = reference.cos_sin_table(MAX_POS, 64, device=device)
    positions = torch.randint(0, MAX_POS, (5,), device=device)
    ops.rotary_embedding(q, k, cos_sin, positions)
    reference.assert_accurate((q, k), rotate_both, before[:, :4, 16:80], before[:, 4:, 16:80], cos_sin, positions)
    reference.assert_same_bits(wide[..., :16], before[..., :16])
    reference.assert_same_bits(wide[..., 80:], before[..., 80:])


def test_no_tokens(device: str, dtype: torch.dtype) -> None:
    q = torch.empty(0, 2, 64, device=device, dtype=dtype)
    cos_sin = reference.cos_sin_table(MAX_POS, 64, device=device)
    ops.rotary_embedding(q, q.clone(), cos_sin, torch.empty(0, dtype=torch.int64, device=device))


def test_bad_position_is_named_and_writes_nothing() -> None:
    q, k = torch.randn(3, 4, 64), torch.randn(3, 2, 64)
    before, cos_sin = q.clone(), reference.cos_sin_table(MAX_POS, 64)
    for bad in (MAX_POS, -1):
        with pytest.raises(RuntimeError) as error:
            ops.rotary_embedding(q, k, cos_sin, torch.tensor([1, 2, bad]))
        assert str(error.value).startswith(
            "rotary_embedding: positions: expected a position from 0 to below 97 (rows of cos_sin), "
            f"got {bad} for token 2"
        )
    reference.assert_same_bits(q, before)


def test_errors() -> None:
    q, k = torch.zeros(3, 4, 64), torch.zeros(3, 2, 64)
    cos_sin, positions = torch.zeros(8, 64), torch.zeros(3, dtype=torch.int64)
    good = (q, k, cos_sin, positions)
    cases = [
        ({1: k[:2]}, "k: expected num_tokens = 3 (from q) in dimension 0, got 2"),
        ({1: k[..., :32]}, "k: expected head_dim = 64 (from q) in dimension 2, got 32"),
        ({1: k.bfloat16()}, "k: expected dtype float32, got bfloat16"),
        ({0: q.mT.contiguous().mT}, "q: expected stride 1 in the last dimension, got 4"),
        ({2: torch.zeros(8, 66)}, "cos_sin: expected an even rotary_dim of at most head_dim = 64, got 66"),
        ({2: torch.zeros(8, 7)}, "cos_sin: expected an even rotary_dim of at most head_dim = 64, got 7"),
        ({2: cos_sin.bfloat16()}, "cos_sin: expected dtype float32, got bfloat16"),
        ({2: torch.zeros(8, 128)[:, :64]}, "cos_sin: expected a contiguous tensor"),
        ({3: positions[:2]}, "positions: expected num_tokens = 3 (from q) in dimension 0, got 2"),
        ({3: positions.int()}, "positions: expected dtype int64, got int32"),
    ]
    for changes, message in cases:
        args = [changes.get(i, arg) for i, arg in enumerate(good)]
        with pytest.raises(RuntimeError) as error:
            ops.rotary_embedding(*args)
        assert str(error.value).startswith("rotary_embedding: " + message)
