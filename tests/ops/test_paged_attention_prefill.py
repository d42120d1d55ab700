from dataclasses import dataclass, replace
from itertools import pairwise

import pytest
import reference
import torch
from paged import ABSURD, Paged, make_paged
from torch import Tensor

from nanovllm import ops

E4M3 = torch.float8_e4m3fn
K_SCALE, V_SCALE = 0.5, 2.0  # exact in every dtype


@dataclass(frozen=True)
class Case:
    context_lens: tuple[int, ...] = (1, 64, 65, 130, 200, 33)
    q_lens: tuple[int, ...] = (1, 64, 1, 70, 200, 0)
    num_q_heads: int = 6
    num_kv_heads: int = 2
    head_dim: int = 64
    block_size: int = 16
    head_major: bool = False


CORNERS = [
    *(Case(num_q_heads=g, num_kv_heads=1) for g in (1, 2, 3, 5, 7, 8, 16)),
    *(Case(head_dim=d) for d in (80, 96, 128, 256)),
    *(Case(block_size=b) for b in (32, 256)),
    Case(head_major=True),
    Case(context_lens=(1,), q_lens=(1,)),
    Case(context_lens=(517,), q_lens=(517,), num_q_heads=3, num_kv_heads=3),
    Case(context_lens=(1021,), q_lens=(3,)),
]
CPU_ONLY = [*(Case(head_dim=d) for d in (8, 24, 56)), Case(block_size=1), Case(num_q_heads=200, num_kv_heads=1)]


def cu_seqlens(q_lens: tuple[int, ...], device: str) -> Tensor:
    return torch.tensor((0, *q_lens), device=device).cumsum(0).int()


def make(case: Case, device: str, dtype: torch.dtype) -> tuple[Tensor, Tensor, Paged]:
    """q, cu_seqlens_q and the cache."""
    torch.manual_seed(0)
    q = torch.randn(sum(case.q_lens), case.num_q_heads, case.head_dim, device=device).to(dtype)
    heads = (case.num_kv_heads, case.head_dim)
    kv = make_paged(list(case.context_lens), *heads, case.block_size, dtype, device, case.head_major)
    return q, cu_seqlens(case.q_lens, device), kv


def prefill(q: Tensor, cu: Tensor, kv: Paged, out: Tensor | None = None) -> Tensor:
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format) if out is None else out
    most, scale = max(cu.diff().tolist(), default=0), q.size(2) ** -0.5
    scales = [torch.tensor([s], device=q.device) if kv.k.dtype == E4M3 else None for s in (K_SCALE, V_SCALE)]
    ops.paged_attention_prefill(out, q, kv.k, kv.v, cu, kv.context_lens, kv.block_tables, most, *scales, scale)
    return out


def prefill_packed(q: Tensor, k: Tensor, v: Tensor, cu: Tensor) -> Tensor:
    out = torch.full_like(q, float("nan"), memory_format=torch.contiguous_format)
    lens, scale = cu.diff(), q.size(2) ** -0.5
    ops.paged_attention_prefill(out, q, k, v, cu, lens, None, int(lens.max()), None, None, scale)
    return out


def check(out: Tensor, q: Tensor, cu: Tensor, kv: Paged) -> None:
    bounds = cu.tolist()
    for b, (begin, end) in enumerate(pairwise(bounds)):
        n = int(kv.context_lens[b])
        k, v = (reference.paged_rows(c, kv.block_tables[b], n) for c in (kv.k, kv.v))
        if k.dtype == E4M3:
            k, v = k.to(q.dtype) * K_SCALE, v.to(q.dtype) * V_SCALE
        args = q[begin:end], k, v, q.size(2) ** -0.5
        reference.assert_accurate(out[begin:end], reference.attention, *args, times=4)


@pytest.mark.parametrize("case", CORNERS, ids=repr)
def test_paged(case: Case, device: str, dtype: torch.dtype) -> None:
    q, cu, kv = make(case, device, dtype)
    check(prefill(q, cu, kv), q, cu, kv)


@pytest.mark.parametrize("case", CPU_ONLY, ids=repr)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_paged_of_what_only_the_cpu_takes(case: Case, dtype: torch.dtype) -> None:
    q, cu, kv = make(case, "cpu", dtype)
    check(prefill(q, cu, kv), q, cu, kv)


@pytest.mark.parametrize("case", [*CORNERS, CPU_ONLY[1]], ids=repr)
def test_float8_cache(case: Case, device: str, dtype: torch.dtype) -> None:
    if case in CPU_ONLY and device != "cpu":
        pytest.skip("only the CPU takes this head_dim")
    q, cu, kv = make(case, device, dtype)
    kv = replace(kv, k=kv.k.to(E4M3), v=kv.v.to(E4M3))
    check(prefill(q, cu, kv), q, cu, kv)


def test_packed_views_of_a_fused_projection(device: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    q_lens = (1, 130, 0, 63)
    qkv = torch.randn(sum(q_lens), 6 + 2 + 2, 64, device=device).to(dtype)
    q, k, v = qkv.split([6, 2, 2], dim=1)
    cu = cu_seqlens(q_lens, device)
    out = prefill_packed(q, k, v, cu)
    for begin, end in pairwise(cu.tolist()):
        args = (*(x[begin:end] for x in (q, k, v)), 0.125)
        reference.assert_accurate(out[begin:end], reference.attention, *args, times=4)


def test_chunks_and_prefix_hits_agree_with_the_whole_prompt(device: str, dtype: torch.dtype) -> None:
    """Within rounding on any device; the blocks of the kernels fall elsewhere."""
    q, cu, kv = make(Case(context_lens=(300,), q_lens=(300,)), device, dtype)
    whole = prefill(q, cu, kv)
    eps = torch.finfo(dtype).eps
    for begin, end in ((0, 1), (0, 77), (77, 200), (100, 300), (299, 300)):
        part = replace(kv, context_lens=kv.context_lens * 0 + end)
        out = prefill(q[begin:end], cu_seqlens((end - begin,), device), part)
        reference.assert_close(out, whole[begin:end], atol=4 * eps, rtol=4 * eps)


def test_strided_out_and_rows_past_the_last_sequence(device: str, dtype: torch.dtype) -> None:
    case = Case()
    q, cu, kv = make(case, device, dtype)
    wide = torch.full((len(q) + 3, 6, 70), 5.0, device=device, dtype=dtype)
    padded = torch.cat([q, torch.full_like(q[:3], float("nan"))])
    prefill(padded, cu, kv, wide[..., :64])
    reference.assert_same_bits(wide[: len(q), :, :64].contiguous(), prefill(q, cu, kv))
    assert (wide[len(q) :] == 5).all() and (wide[..., 64:] == 5).all()


def test_nothing_to_do(device: str, dtype: torch.dtype) -> None:
    q, cu, kv = make(Case(context_lens=(5, 0), q_lens=(0, 0)), device, dtype)
    assert prefill(q, cu, kv).shape == (0, 6, 64)


def test_errors() -> None:
    q, cu, kv = make(Case(context_lens=(20, 40), q_lens=(3, 40)), "cpu", torch.float32)
    out, lens = torch.zeros_like(q), kv.context_lens
    good = [out, q, kv.k, kv.v, cu, lens, kv.block_tables, 40, None, None, 0.125]
    packed = torch.zeros(43, 2, 64)
    bad_id = kv.block_tables.clone()
    bad_id[1, 2] = ABSURD
    cases = [
        (
            {6: bad_id},
            f"block_tables: expected block ids 0 to 7 within the context of 40 tokens, got {ABSURD} at [1, 2]",
        ),
        (
            {5: torch.tensor([20, 100], dtype=torch.int32)},
            "context_lens: expected 0 to 80 (5 blocks of 16), got 100 at [1]",
        ),
        ({5: lens - 18}, "context_lens: expected at least 3 (queries of the sequence) at [0], got 2"),
        ({6: kv.block_tables[:, :0], 5: lens * 0 + 3}, "block_tables: expected at least one block, got shape [2, 0]"),
        ({4: cu - 1}, "cu_seqlens_q: expected 0 or more at [0], got -1"),
        ({4: torch.tensor([0, 10, 3]).int()}, "cu_seqlens_q: expected 10 to 43 (num_tokens) at [2], got 3"),
        ({4: cu[:2]}, "cu_seqlens_q: expected size 3 in dimension 0, got 2"),
        ({7: 39}, "max_seqlen_q: expected at least 40 (queries of sequence 1), got 39"),
        ({8: torch.ones(1)}, "k_scale: expected None for a float32 cache, got a tensor"),
        ({2: kv.k.to(E4M3)}, "v: expected dtype float8_e4m3fn, got float32"),
        ({6: None}, "k: expected 3 dimensions, got 4 of shape [8, 16, 2, 64]"),
        ({2: packed, 3: packed, 6: None}, "context_lens: expected 3 (queries of the sequence, as k and v are packed)"),
        ({3: kv.v.bfloat16()}, "v: expected dtype float32, got bfloat16"),
    ]
    for changes, message in cases:
        args = list(good)
        for i, value in changes.items():
            args[i] = value
        with pytest.raises(RuntimeError) as error:
            ops.paged_attention_prefill(*args)
        assert str(error.value).startswith("paged_attention_prefill: " + message)
