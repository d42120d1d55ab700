from dataclasses import dataclass

import pytest
import reference
import torch
from torch import Tensor

from nanovllm import ops

NAN = float("nan")
E4M3 = torch.float8_e4m3fn


@dataclass(frozen=True)
class Case:
    num_tokens: int
    num_kv_heads: int
    head_dim: int
    block_size: int

    def __repr__(self) -> str:
        return f"t{self.num_tokens}-h{self.num_kv_heads}-d{self.head_dim}-block{self.block_size}"


CORNERS = [
    Case(0, 2, 64, 16),
    Case(1, 1, 1, 1),
    Case(1, 3, 64, 16),
    Case(5, 1, 80, 1),
    Case(7, 3, 17, 4),
    Case(67, 2, 24, 32),
    Case(257, 8, 128, 256),
]


def inputs(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """k, v, NaN-filled caches, and distinct slots with every fourth -1."""
    torch.manual_seed(0)
    k, v = torch.randn(2, case.num_tokens, case.num_kv_heads, case.head_dim, device=device).to(dtype)
    num_blocks = case.num_tokens // case.block_size + 2
    caches = torch.full((2, num_blocks, case.block_size, case.num_kv_heads, case.head_dim), NAN, device=device)
    slots = torch.randperm(num_blocks * case.block_size, device=device)[: case.num_tokens]
    slots[3::4] = -1
    return k, v, *caches.to(dtype), slots


@pytest.mark.parametrize("case", CORNERS, ids=repr)
def test_bits(device: str, dtype: torch.dtype, case: Case) -> None:
    k, v, k_cache, v_cache, slots = inputs(case, device, dtype)
    want = [reference.store_kv_cache(x, c, slots) for x, c in ((k, k_cache), (v, v_cache))]
    ops.store_kv_cache(k, v, k_cache, v_cache, slots)
    reference.assert_same_bits(k_cache, want[0], "k_cache")
    reference.assert_same_bits(v_cache, want[1], "v_cache")


@pytest.mark.parametrize("case", CORNERS, ids=repr)
def test_float8_bits(device: str, dtype: torch.dtype, case: Case) -> None:
    k, v, k_cache, v_cache, slots = inputs(case, device, dtype)
    k_cache, v_cache = k_cache.to(E4M3), v_cache.to(E4M3)
    k_scale = torch.tensor([0.3], device=device)
    want_k = reference.store_kv_cache(k, k_cache, slots, k_scale)
    want_v = reference.store_kv_cache(v, v_cache, slots)
    ops.store_kv_cache(k, v, k_cache, v_cache, slots, k_scale, None)
    reference.assert_same_bits(k_cache, want_k, "k_cache")
    reference.assert_same_bits(v_cache, want_v, "v_cache")


@pytest.mark.parametrize("scale", [1.0, 0.3, 7.0, 448.0, 1e-3, 1e-20, 1e20, 2 - 2.0**-23])
def test_float8_rounding_and_saturation(device: str, dtype: torch.dtype, scale: float) -> None:
    """Of x / scale; a scale whose mantissa is all ones has the reciprocal that is hardest to divide with."""
    codes = torch.arange(256, dtype=torch.uint8).view(E4M3).float()
    values = codes[codes.isfinite()].sort().values
    halfway = (values[1:] + values[:-1]) / 2  # exact in every dtype: ties go to the even code
    edges = torch.tensor([464.0, 465.0, 1e4, float("inf"), -float("inf"), 2.0**-10, 2.0**-11, -0.0])
    x = torch.cat([values, halfway, edges])
    x = torch.cat([x, x.new_zeros(-len(x) % 16)]).to(device).to(dtype).view(-1, 1, 16)
    cache = torch.zeros(len(x), 1, 1, 16, device=device).to(E4M3)
    slots = torch.arange(len(x), device=device)
    by = torch.tensor([scale], device=device)
    want = reference.store_kv_cache(x, cache, slots, by)
    ops.store_kv_cache(x, x, cache, cache.clone(), slots, by, None)
    reference.assert_same_bits(cache, want)


def test_strides(device: str, dtype: torch.dtype) -> None:
    """k and v as slices of qkv, heads apart; caches head-major inside a block, K beside V."""
    torch.manual_seed(0)
    qkv = torch.randn(9, 8, 96, device=device).to(dtype)
    k, v = qkv[:, 4:6, 16:80], qkv[:, 6:8, 16:80]
    pool = torch.full((3, 2, 8, 2, 64), NAN, device=device).to(dtype)  # [block, head, slot, k or v, D]
    k_cache, v_cache = pool.permute(3, 0, 2, 1, 4)
    slots = torch.tensor([23, 0, -1, 8, 7, 15, 16, 3, -1], device=device)
    want = [reference.store_kv_cache(x, c, slots) for x, c in ((k, k_cache), (v, v_cache))]
    ops.store_kv_cache(k, v, k_cache, v_cache, slots)
    reference.assert_same_bits(k_cache, want[0], "k_cache")
    reference.assert_same_bits(v_cache, want[1], "v_cache")


def test_misaligned_rows(device: str, dtype: torch.dtype) -> None:
    """A first element and strides that no 16-byte access fits."""
    torch.manual_seed(0)
    k, v = torch.randn(2, 5, 2, 65, device=device).to(dtype)[..., 1:]
    caches = torch.full((2, 2, 4, 2, 65), NAN, device=device).to(dtype)[..., 1:]
    slots = torch.tensor([7, -1, 0, 3, 4], device=device)
    want = [reference.store_kv_cache(x, c, slots) for x, c in zip((k, v), caches)]
    ops.store_kv_cache(k, v, *caches, slots)
    for got, expected in zip(caches, want):
        reference.assert_same_bits(got, expected)


def test_empty_cache_takes_tokens_without_slots(device: str, dtype: torch.dtype) -> None:
    k = torch.randn(3, 2, 64, device=device).to(dtype)
    cache = torch.empty(0, 16, 2, 64, device=device, dtype=dtype)
    ops.store_kv_cache(k, k, cache, cache.clone(), torch.full((3,), -1, device=device))


@pytest.mark.slow
def test_offsets_pass_two_to_the_31(device: str, dtype: torch.dtype) -> None:
    """The last slot of a cache of 2^31 + 2^20 elements; the pages in between are never touched on CPU."""
    num_blocks = 2**11 + 1
    cache = torch.empty(num_blocks, 1024, 8, 128, device=device, dtype=dtype)
    k = torch.randn(1, 8, 128, device=device).to(dtype)
    ops.store_kv_cache(k, k, cache, cache, torch.tensor([num_blocks * 1024 - 1], device=device))
    reference.assert_same_bits(cache[-1, -1], k[0])


def test_bad_slot_is_named_and_writes_nothing() -> None:
    k, v, k_cache, v_cache, slots = inputs(Case(67, 2, 24, 16), "cpu", torch.float32)
    for bad in (k_cache.size(0) * 16, 2**40, -2):
        slots[65] = bad
        with pytest.raises(RuntimeError) as error:
            ops.store_kv_cache(k, v, k_cache, v_cache, slots)
        assert str(error.value).startswith(
            f"store_kv_cache: slots: expected -1 or a slot below 96 (6 blocks of 16), got {bad} for token 65"
        )
    assert k_cache.isnan().all() and v_cache.isnan().all()


def test_errors() -> None:
    k, v, k_cache, v_cache, slots = inputs(Case(3, 2, 64, 16), "cpu", torch.float32)
    scale = torch.ones(1)
    good = (k, v, k_cache, v_cache, slots, None, None)
    cases = [
        ({1: v[:2]}, "v: expected num_tokens = 3 (from k) in dimension 0, got 2"),
        ({1: v[:, :1]}, "v: expected num_kv_heads = 2 (from k) in dimension 1, got 1"),
        ({2: k_cache[..., :32]}, "k_cache: expected head_dim = 64 (from k) in dimension 3, got 32"),
        ({2: k_cache[0]}, "k_cache: expected 4 dimensions, got 3"),
        ({3: v_cache[:1]}, "v_cache: expected num_blocks = 2 (from k_cache) in dimension 0, got 1"),
        (
            {2: k_cache[:, :12], 3: v_cache[:, :12]},
            "k_cache: expected a block size that is a power of two, got 12",
        ),
        ({1: v.bfloat16()}, "v: expected dtype float32, got bfloat16"),
        (
            {2: k_cache.half()},
            "k_cache: expected dtype float32 (of the new keys) or float8_e4m3fn, got float16",
        ),
        ({3: v_cache.to(E4M3)}, "v_cache: expected dtype float32, got float8_e4m3fn"),
        ({4: slots.int()}, "slots: expected dtype int64, got int32"),
        ({5: scale}, "k_scale: expected None for a float32 cache, got a tensor"),
        (
            {2: k_cache.to(E4M3), 3: v_cache.to(E4M3), 6: torch.ones(2)},
            "v_scale: expected size 1 in dimension 0",
        ),
        ({0: k.mT.contiguous().mT}, "k: expected stride 1 in the last dimension, got 2"),
        ({3: v_cache.mT.contiguous().mT}, "v_cache: expected stride 1 in the last dimension, got 2"),
    ]
    for changes, message in cases:
        args = [changes.get(i, arg) for i, arg in enumerate(good)]
        with pytest.raises(RuntimeError) as error:
            ops.store_kv_cache(*args)
        assert str(error.value).startswith("store_kv_cache: " + message)
