from dataclasses import dataclass
from typing import Any

import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops

NAN, EPS, MAX_POS = float("nan"), 1e-6, 97


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rotary_dim: int
    block_size: int = 16
    q_norm: bool = True
    k_norm: bool = True

    def __repr__(self) -> str:
        norms = "q" * self.q_norm + "k" * self.k_norm or "no"
        heads = f"h{self.num_q_heads}+{self.num_kv_heads}-d{self.head_dim}-rot{self.rotary_dim}"
        return f"t{self.num_tokens}-{heads}-block{self.block_size}-{norms}norm"


CORNERS = [
    Case(0, 4, 2, 64, 64),
    Case(1, 1, 1, 8, 8, block_size=1),
    Case(1, 9, 3, 64, 64, q_norm=False, k_norm=False),
    Case(3, 16, 1, 128, 128),
    Case(5, 4, 2, 64, 32, k_norm=False),
    Case(5, 4, 2, 80, 80, q_norm=False),
    Case(7, 3, 3, 24, 10, block_size=4),
    Case(67, 6, 2, 96, 96),
    Case(5, 40, 8, 256, 64),
    Case(3, 3, 1, 120, 40),
]


def inputs(case: Case, device: str, dtype: torch.dtype) -> list[Any]:
    """The operator's arguments; caches are NaN, every fourth slot is -1."""
    torch.manual_seed(0)
    d, num_heads = case.head_dim, case.num_q_heads + 2 * case.num_kv_heads
    qkv = torch.randn(case.num_tokens, num_heads * d, device=device).to(dtype)
    q_weight, k_weight = torch.randn(2, d, device=device).to(dtype)
    num_blocks = case.num_tokens // case.block_size + 2
    shape = (2, num_blocks, case.block_size, case.num_kv_heads, d)
    k_cache, v_cache = torch.full(shape, NAN, device=device).to(dtype)
    slots = torch.randperm(num_blocks * case.block_size, device=device)[: case.num_tokens]
    slots[3::4] = -1
    return [
        qkv,
        q_weight if case.q_norm else None,
        k_weight if case.k_norm else None,
        reference.cos_sin_table(MAX_POS, case.rotary_dim, device=device),
        torch.randint(0, MAX_POS, (case.num_tokens,), device=device),
        k_cache,
        v_cache,
        slots,
        None,
        None,
        case.num_q_heads,
        case.num_kv_heads,
        EPS,
    ]


def parts(qkv: Tensor, num_q_heads: int, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    heads = qkv.unflatten(1, (num_q_heads + 2 * num_kv_heads, -1))
    return heads.split([num_q_heads, num_kv_heads, num_kv_heads], dim=1)


def check(args: list[Any]) -> None:
    """Runs it: qkv near the truth, v as it was, the caches with the bits that qkv then holds."""
    qkv, q_weight, k_weight, cos_sin, positions, k_cache, v_cache, slots, k_scale, v_scale, *heads, eps = args
    before, empty = qkv.clone(), (k_cache.clone(), v_cache.clone())
    ops.qk_norm_rope_store(*args)
    reference.assert_accurate(qkv, reference.qk_norm_rope, before, q_weight, k_weight, cos_sin, positions, *heads, eps)
    _, k, v = parts(qkv, *heads)
    reference.assert_same_bits(v, parts(before, *heads)[2], "v")
    reference.assert_same_bits(k_cache, reference.store_kv_cache(k, empty[0], slots, k_scale), "k_cache")
    reference.assert_same_bits(v_cache, reference.store_kv_cache(v, empty[1], slots, v_scale), "v_cache")


@pytest.mark.parametrize("case", CORNERS, ids=repr)
def test_corners(device: str, dtype: torch.dtype, case: Case) -> None:
    check(inputs(case, device, dtype))


def test_strided_rows_and_head_major_cache(device: str, dtype: torch.dtype) -> None:
    args = inputs(Case(9, 4, 2, 64, 64, block_size=8), device, dtype)
    wide = torch.randn(9, 8 * 64 + 32, device=device).to(dtype)
    before, args[0] = wide.clone(), wide[:, 16:-16]
    args[5:7] = torch.full((3, 2, 8, 2, 64), NAN, device=device).to(dtype).permute(3, 0, 2, 1, 4)
    check(args)
    reference.assert_same_bits(wide[:, :16], before[:, :16])
    reference.assert_same_bits(wide[:, -16:], before[:, -16:])


def test_float8_cache(device: str, dtype: torch.dtype) -> None:
    """The cache holds the rounded k of qkv over its scale: the bits of store_kv_cache after the fact."""
    args = inputs(Case(9, 4, 2, 64, 64), device, dtype)
    args[5:7] = [cache.to(torch.float8_e4m3fn) for cache in args[5:7]]
    args[8] = torch.tensor([0.3], device=device)
    check(args)


def test_empty_cache_takes_tokens_without_slots(device: str, dtype: torch.dtype) -> None:
    args = inputs(Case(3, 4, 2, 64, 64), device, dtype)
    args[5:7] = [cache[:0] for cache in args[5:7]]
    args[7].fill_(-1)
    check(args)


def test_equals_qwen3_of_transformers() -> None:
    modeling = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    args = inputs(Case(9, 9, 3, 64, 64), "cpu", torch.float32)
    qkv, q_weight, k_weight, cos_sin, positions = args[:5]
    q, k, _ = parts(qkv.clone(), 9, 3)
    norms = [modeling.Qwen3RMSNorm(64, eps=EPS) for _ in range(2)]
    for norm, weight in zip(norms, (q_weight, k_weight)):
        norm.weight.data = weight
    cos, sin = (half.repeat(1, 2) for half in cos_sin[positions].chunk(2, dim=1))
    with torch.no_grad():
        want = modeling.apply_rotary_pos_emb(norms[0](q), norms[1](k), cos, sin, unsqueeze_dim=1)
    ops.qk_norm_rope_store(*args)
    for got, expected in zip(parts(qkv, 9, 3), want):
        reference.assert_close(got, expected, atol=1e-6, rtol=1e-6)


def test_bad_values_are_named_and_write_nothing() -> None:
    args = inputs(Case(5, 4, 2, 64, 64), "cpu", torch.float32)
    before = args[0].clone()
    cases = [
        (
            {4: MAX_POS},
            "positions: expected a position from 0 to below 97 (rows of cos_sin), got 97 for token 4",
        ),
        ({4: -1}, "positions: expected a position from 0 to below 97 (rows of cos_sin), got -1 for token 4"),
        ({7: 32}, "slots: expected -1 or a slot below 32 (2 blocks of 16), got 32 for token 4"),
        ({7: -2}, "slots: expected -1 or a slot below 32 (2 blocks of 16), got -2 for token 4"),
    ]
    for changes, message in cases:
        bad = list(args)
        for i, value in changes.items():
            bad[i] = args[i].clone()
            bad[i][4] = value
        with pytest.raises(RuntimeError) as error:
            ops.qk_norm_rope_store(*bad)
        assert str(error.value).startswith("qk_norm_rope_store: " + message)
    reference.assert_same_bits(args[0], before)
    assert args[5].isnan().all() and args[6].isnan().all()


def test_errors() -> None:
    good = inputs(Case(3, 4, 2, 64, 64), "cpu", torch.float32)
    qkv, k_cache = good[0], good[5]
    cases = [
        ({0: qkv[:, 1:]}, "qkv: expected a width that 4 + 2 * 2 heads divide, got 511"),
        ({10: 0}, "num_q_heads: expected 1 to 2147483647, got 0"),
        ({10: 2**62, 11: 2**62 + 2**61}, f"num_q_heads: expected 1 to 2147483647, got {2**62}"),  # their sum is 0
        ({11: -1}, "num_kv_heads: expected 1 to 2147483647, got -1"),
        ({1: torch.ones(32)}, "q_weight: expected head_dim = 64 (from qkv) in dimension 0, got 32"),
        ({2: torch.ones(64).bfloat16()}, "k_weight: expected dtype float32, got bfloat16"),
        ({3: torch.zeros(8, 66)}, "cos_sin: expected an even rotary_dim of at most head_dim = 64, got 66"),
        ({4: good[4][:2]}, "positions: expected num_tokens = 3 (from qkv) in dimension 0, got 2"),
        ({5: k_cache[:, :, :1]}, "k_cache: expected num_kv_heads = 2 (from qkv) in dimension 2, got 1"),
        ({6: k_cache[:, :8]}, "v_cache: expected block_size = 16 (from k_cache) in dimension 1, got 8"),
        ({7: good[7].int()}, "slots: expected dtype int64, got int32"),
        ({9: torch.ones(1)}, "v_scale: expected None for a float32 cache, got a tensor"),
    ]
    for changes, message in cases:
        with pytest.raises(RuntimeError) as error:
            ops.qk_norm_rope_store(*[changes.get(i, arg) for i, arg in enumerate(good)])
        assert str(error.value).startswith("qk_norm_rope_store: " + message)
